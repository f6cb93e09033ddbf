// SPDX-License-Identifier: Apache-2.0
#include "gemv/gemv.h"

#include "gemv/gemv_launch.cuh"

namespace astrai::gemv {

const DeviceInfo& device_info(int device) {
  return cached_device(device, [device] {
    const auto* kernel =
        reinterpret_cast<const void*>(gemv_kernel<RowSource::kAligned, true, false, 1, 1>);
    return query_device(device, kernel, "astrai-gemv");
  });
}

void launch_gemv(const GemvParams& params, const GemvPlan& plan, int device, cudaStream_t stream) {
  if (plan.source == RowSource::kAligned)
    launch_source<RowSource::kAligned>(params, plan, device, stream, "bf16_gemv");
  else
    launch_source<RowSource::kUnaligned>(params, plan, device, stream, "bf16_gemv");
}

}  // namespace astrai::gemv
