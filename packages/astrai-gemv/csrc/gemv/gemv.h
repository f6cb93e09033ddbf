// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "gemv/gemv_params.h"
#include "gemv/gemv_plan.h"

namespace astrai::gemv {

// The device as the loaded image of this family sees it.
const DeviceInfo& device_info(int device);

// Launches the planned kernel on `stream` of the current device.
void launch_gemv(const GemvParams& params, const GemvPlan& plan, int device, cudaStream_t stream);
void launch_swiglu(const GemvParams& params, const GemvPlan& plan, int device, cudaStream_t stream);

}  // namespace astrai::gemv
