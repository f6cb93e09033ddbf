// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "astrai/host/device.h"

namespace astrai::gemv {

struct AddRmsNormParams {
  const __nv_bfloat16* x;         // [m, hidden], contiguous
  const __nv_bfloat16* residual;  // [m, hidden], contiguous
  const __nv_bfloat16* weight;    // [hidden]
  __nv_bfloat16* out;             // [m, hidden]
  __nv_bfloat16* sum;             // [m, hidden]: x + residual
  int m, hidden;
  float eps;
  bool static_weights;  // weight may be read before griddepcontrol.wait
};

struct AddRmsNormPlan {
  int vector;   // elements per access: 8 where everything starts on 16 bytes, else 1
  int threads;  // of the one CTA that takes a row
  bool programmatic;
};

AddRmsNormPlan plan_add_rms_norm(int hidden, bool aligned, const DeviceInfo& device);

void launch_add_rms_norm(const AddRmsNormParams& params, const AddRmsNormPlan& plan,
                         cudaStream_t stream);

}  // namespace astrai::gemv
