// SPDX-License-Identifier: Apache-2.0
#include "norm/add_rms_norm.h"

#include "astrai/host/launch.h"
#include "norm/add_rms_norm_kernel.cuh"

namespace astrai::gemv {

void launch_add_rms_norm(const AddRmsNormParams& params, const AddRmsNormPlan& plan,
                         cudaStream_t stream) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.m));
  shape.block = dim3(static_cast<unsigned>(plan.threads));
  shape.programmatic = plan.programmatic;
  if (plan.vector == 8)
    launch(add_rms_norm_kernel<8>, shape, stream, "add_rms_norm", params);
  else
    launch(add_rms_norm_kernel<1>, shape, stream, "add_rms_norm", params);
}

}  // namespace astrai::gemv
