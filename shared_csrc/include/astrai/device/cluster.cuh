// SPDX-License-Identifier: Apache-2.0
// Thread block clusters, sm_90 and newer: CTAs that send to each other's shared memory. A barrier of shared
// memory counts the bytes that arrive, so that neither side needs a fence; the release of a cluster
// barrier is a fence of the whole GPU.
#pragma once

#include <cstdint>

namespace astrai {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// By one thread; `bytes` will come.
__device__ __forceinline__ void init_inbox(uint32_t barrier, int bytes) {
  asm volatile(
      "mbarrier.init.shared.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;\n"
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// Between the two, every CTA of the cluster has begun and initialised its inbox.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// To the place that `smem` has in the CTA of that rank, whose barrier lies where `barrier` does here.
__device__ __forceinline__ void send(uint32_t smem, uint32_t barrier, int rank, const float4& v) {
  asm volatile(
      "{ .reg .u32 to, its;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 its, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [its]; "
      "}" ::"r"(smem),
      "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

__device__ __forceinline__ void send(uint32_t smem, uint32_t barrier, int rank, const float2& v) {
  asm volatile(
      "{ .reg .u32 to, its;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 its, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [its]; }" ::"r"(
          smem),
      "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y)
      : "memory");
}

__device__ __forceinline__ void send(uint32_t smem, uint32_t barrier, int rank, float v) {
  asm volatile(
      "{ .reg .u32 to, its;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 its, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %3, [its]; }" ::"r"(smem),
      "r"(barrier), "r"(rank), "f"(v)
      : "memory");
}

// Until all bytes are there.
__device__ __forceinline__ void wait_for_inbox(uint32_t barrier) {
  asm volatile(
      "{ .reg .pred done;\n"
      "AGAIN_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra AGAIN_%=; }" ::"r"(barrier)
      : "memory");
}
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void init_inbox(uint32_t, int) {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <class T>
__device__ __forceinline__ void send(uint32_t, uint32_t, int, const T&) {}
__device__ __forceinline__ void wait_for_inbox(uint32_t) {}
#endif

}  // namespace astrai
