// SPDX-License-Identifier: Apache-2.0
// Launches decode attention without Python.
#pragma once

#include "attention/decode_params.h"
#include "check.cuh"
#include "family.h"

namespace check {

struct DecodeShape {
  int batch, q_heads, kv_heads, head_dim, length;
};

// q and out are [batch, q_heads, head_dim], contiguous. The workspace grows with the largest plan.
template <class Kv>
void decode(const DecodeShape& s, astrai::attention::DecodeParams<Kv> params, cudaStream_t stream) {
  using namespace astrai::attention;
  static float* workspace = nullptr;
  static int64_t held = 0;
  const DecodePlan plan =
      plan_decode({s.batch, s.q_heads, s.kv_heads, s.head_dim, s.length}, device_info(0));
  if (plan.workspace_floats > held) {
    cudaFree(workspace);
    ok(cudaMalloc(&workspace, plan.workspace_floats * sizeof(float)), "cudaMalloc");
    held = plan.workspace_floats;
  }
  params.q_stride = params.out_stride = {int64_t{s.q_heads} * s.head_dim, s.head_dim};
  params.scale_log2 = static_cast<float>(1.4426950408889634 / std::sqrt(double(s.head_dim)));
  params.max_length = s.length;
  params.kv_heads = s.kv_heads;
  params.group = s.q_heads / s.kv_heads;
  params.head_groups = plan.head_groups;
  params.parts = plan.parts;
  while (1 << params.parts_log2 < plan.parts) ++params.parts_log2;
  params.splits = plan.splits;
  params.sums = workspace;
  params.stats =
      reinterpret_cast<float2*>(workspace + plan.grid * kDecodeHeads * int64_t{s.head_dim});
  launch_decode(params, plan, s.head_dim, 0, stream);
}

}  // namespace check
