// SPDX-License-Identifier: Apache-2.0
// One launch call for all kernels, with programmatic dependent launch and clusters.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "astrai/host/device.h"
#include "astrai/host/error.h"

namespace astrai {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  int smem_bytes = 0;
  int cluster = 1;  // CTAs along x that form a cluster; above 1: sm_90 and newer
  // The kernel must then execute griddepcontrol.wait on every path before it reads or writes what
  // another kernel touches.
  bool programmatic = false;
};

// Lets a kernel have more than 48 KB of shared memory. That is per kernel and device, and costs a
// microsecond, so once is enough: one of these for each kernel.
class SmemOptIn {
 public:
  template <class... Params>
  void operator()(void (*kernel)(Params...), int bytes, int device, const char* what) {
    if (done_[device].load(std::memory_order_acquire)) return;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               what);
    done_[device].store(true, std::memory_order_release);
  }

 private:
  std::atomic<bool> done_[kMaxDevices]{};
};

// Whether programmatic launches are programmatic: measurements turn them off, to tell what they gain.
inline std::atomic<bool> dependent_launches{true};

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
            const char* what, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (shape.programmatic && dependent_launches.load(std::memory_order_relaxed)) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, Params(args)...), what);
}

}  // namespace astrai
