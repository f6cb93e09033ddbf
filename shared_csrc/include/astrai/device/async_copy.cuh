// SPDX-License-Identifier: Apache-2.0
// cp.async (sm_80 and newer): 16 bytes from global to shared memory, past L1.
#pragma once

#include <cstdint>

namespace astrai {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// An L2 policy for data that is read once: its lines leave before those of others.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies `bytes` (0..16) and fills the rest of the 16 with zeros; with 0, `global` is not read and need
// not be valid. Both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global, int bytes,
                                            uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(smem),
               "l"(global), "r"(bytes), "l"(policy)
               : "memory");
}

// For data that others read again: L2 keeps it as it keeps everything.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when at most kPending of this thread's newest groups are incomplete.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 ld_shared_16(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(smem)
               : "memory");
  return v;
}

// Brings `bytes` (a multiple of 16) from a 16-byte boundary on to L2; sm_90 and newer.
__device__ __forceinline__ void prefetch_l2(const void* global, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

}  // namespace astrai
