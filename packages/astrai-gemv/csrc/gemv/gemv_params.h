// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace astrai::gemv {

// Strides are in elements.
struct GemvParams {
  const __nv_bfloat16* x;       // [m, k], contiguous
  const __nv_bfloat16* weight;  // [n, k], rows contiguous; swiglu: the up projection
  const __nv_bfloat16* gate;    // [n, k]; swiglu only, else null
  const __nv_bfloat16* bias;    // [n], may be null
  __nv_bfloat16* out;           // [m, n], contiguous
  int64_t row_stride;           // of weight
  int64_t gate_stride;          // of gate
  int m, n, k;
  int window;           // GemvPlan::window
  int parts;            // GemvPlan::parts
  bool static_weights;  // weight (and gate) may be read before griddepcontrol.wait
};

}  // namespace astrai::gemv
