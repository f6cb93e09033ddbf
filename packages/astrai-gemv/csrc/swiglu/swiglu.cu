// SPDX-License-Identifier: Apache-2.0
#include "gemv/gemv.h"
#include "gemv/gemv_launch.cuh"

namespace astrai::gemv {

void launch_swiglu(const GemvParams& params, const GemvPlan& plan, int device,
                   cudaStream_t stream) {
  launch_source<RowSource::kSwiglu>(params, plan, device, stream, "bf16_swiglu");
}

}  // namespace astrai::gemv
