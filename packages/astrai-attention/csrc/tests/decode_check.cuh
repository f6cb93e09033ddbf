// SPDX-License-Identifier: Apache-2.0
// Launches decode attention without Python.
#pragma once

#include "attend.cuh"
#include "attention/decode_params.h"
#include "family.h"

namespace check {

struct DecodeShape {
  int batch, q_heads, kv_heads, head_dim, length;
};

// q and out are [batch, q_heads, head_dim], contiguous. The workspace grows with the largest plan.
template <class Kv>
void decode(const DecodeShape& s, astrai::attention::DecodeParams<Kv> params, cudaStream_t stream) {
  using namespace astrai::attention;
  static void* workspace = nullptr;
  static int64_t held = 0;
  const DecodeProblem problem{s.batch,    s.q_heads, s.kv_heads,
                              s.head_dim, s.length,  /*is_exact=*/false};
  const DecodePlan plan = plan_decode(problem, device_info(0));
  if (plan.workspace_bytes > held) {
    cudaFree(workspace);
    ok(cudaMalloc(&workspace, plan.workspace_bytes), "cudaMalloc");
    held = plan.workspace_bytes;
  }
  params.q_stride = params.out_stride = {int64_t{s.q_heads} * s.head_dim, s.head_dim};
  params.scale_log2 = static_cast<float>(1.4426950408889634 / std::sqrt(double(s.head_dim)));
  set_plan(params, problem, plan, workspace);
  launch_decode(params, plan, s.head_dim, 0, stream);
}

}  // namespace check
