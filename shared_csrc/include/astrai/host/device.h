// SPDX-License-Identifier: Apache-2.0
// What a launch plan may know of a device, and the guard under which everything is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "astrai/host/error.h"

namespace astrai {

constexpr int kMaxDevices = 128;

struct DeviceInfo {
  int sm_count;
  int device_arch;     // 10 * major + minor of the GPU
  int image_arch;      // what the loaded code was compiled for: 80 for compute_80 PTX on any GPU
  int smem_per_sm;     // bytes
  int smem_per_block;  // bytes, with the opt-in
};

// For a plan: `bytes` of shared memory in a block.
inline void expect_smem(const DeviceInfo& device, int bytes) {
  if (bytes > device.smem_per_block)
    throw std::runtime_error(concat("the kernel needs ", bytes,
                                    " bytes of shared memory per block, this GPU has ",
                                    device.smem_per_block));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ == device) {
      previous_ = -1;
      return;
    }
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// `kernel` is any kernel of the module: all of them come from the same image. PTX that the driver
// compiled reports the GPU in binaryVersion and its own target in ptxVersion; only the latter says
// which instructions the source compiled to.
inline DeviceInfo query_device(int device, const void* kernel, const char* family) {
  DeviceGuard guard(device);
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  int major = 0, minor = 0;
  DeviceInfo info{};
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "cudaDeviceGetAttribute");
  info.device_arch = 10 * major + minor;
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    throw std::runtime_error(concat(family, " has no code for this GPU (sm_", info.device_arch,
                                    "): ", cudaGetErrorString(status)));
  }
  check_cuda(status, "cudaFuncGetAttributes");
  info.image_arch = std::min(attributes.ptxVersion, attributes.binaryVersion);
  check_cuda(cudaDeviceGetAttribute(&info.sm_count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&info.smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                    device),
             "cudaDeviceGetAttribute");
  check_cuda(
      cudaDeviceGetAttribute(&info.smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
      "cudaDeviceGetAttribute");
  return info;
}

// One slot per device; `query` runs once for each, under a lock, and again if it threw.
template <class Query>
const DeviceInfo& cached_device(int device, Query&& query) {
  static std::array<DeviceInfo, kMaxDevices> slots;
  static std::array<std::atomic<bool>, kMaxDevices> ready{};
  static std::mutex mutex;
  if (device < 0 || device >= kMaxDevices)
    throw ValueError(concat("device: expected an index below ", kMaxDevices, ", got ", device));
  if (!ready[device].load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!ready[device].load(std::memory_order_relaxed)) {
      slots[device] = query();
      ready[device].store(true, std::memory_order_release);
    }
  }
  return slots[device];
}

}  // namespace astrai
