// SPDX-License-Identifier: Apache-2.0
// Launches prefill attention without Python.
#pragma once

#include "attend.cuh"
#include "attention/prefill_params.h"
#include "family.h"

namespace check {

// q and out are [rows, q_heads, head_dim], contiguous.
template <class Params>
void set_common(Params& params, const astrai::attention::PrefillPlan& plan, int q_heads,
                int kv_heads, int head_dim, int64_t batch_rows, bool causal) {
  const int64_t row = int64_t{q_heads} * head_dim;
  params.q_stride = params.out_stride = {row * batch_rows, row, head_dim};
  params.scale_log2 = static_cast<float>(1.4426950408889634 / std::sqrt(double(head_dim)));
  params.slack = astrai::attention::kPrefillSlack / params.scale_log2;
  params.heads_shift = plan.heads_shift;
  params.group = q_heads / kv_heads;
  params.causal = causal;
}

}  // namespace check
