// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PTX griddepcontrol, sm_90 and newer; nothing below).
#pragma once

namespace astrai {

// Lets the next kernel of the stream become resident; says nothing about this kernel's writes.
__device__ __forceinline__ void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when all kernels before this one have finished and their writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace astrai
