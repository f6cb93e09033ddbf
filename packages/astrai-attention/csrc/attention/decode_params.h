// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/decode_plan.h"
#include "attention/kv_source.cuh"

namespace astrai::attention {

// Strides are in elements; head_dim has stride 1 and rows start on 16 bytes.
struct DecodeStrides {
  int64_t batch, head;
};

// True keeps a key; null: no mask.
struct DecodeMask {
  const uint8_t* data;
  int64_t batch_stride, key_stride;
};

// The K and V of the newest token, at position length - 1, which the kernel reads here and stores in the
// pool; null: the pool has them.
struct NewToken {
  const __nv_bfloat16* k;
  const __nv_bfloat16* v;
  DecodeStrides k_stride, v_stride;
};

template <class Kv>
struct DecodeParams {
  const __nv_bfloat16* q;  // [batch, q_heads, head_dim]
  __nv_bfloat16* out;
  float* lse;  // [batch, q_heads], may be null
  DecodeStrides q_stride, out_stride;
  Kv kv;
  DecodeMask mask;
  NewToken fresh;
  float scale_log2;   // of the scores, times log2(e)
  int max_length;     // lengths above are taken for it: no read leaves K, V or the page table
  bool static_cache;  // `kv` may be read before griddepcontrol.wait, where `fresh` is not
  int kv_heads;
  int group;        // query heads of a KV head
  int head_groups;  // DecodePlan::head_groups
  int parts;        // DecodePlan::parts, a power of two
  int parts_log2;
  int splits;     // DecodePlan::splits
  float* sums;    // [units, splits, kDecodeHeads, head_dim], not normalised; null without splits
  float2* stats;  // [units, splits, kDecodeHeads]: maximum of the scores in log2, sum
  unsigned* arrivals;  // [units], 0 between launches; null: merge_kernel merges splits
};

// What follows from a problem and its plan; `workspace`: plan.workspace_bytes, on 16 bytes.
template <class Kv>
void set_plan(DecodeParams<Kv>& params, const DecodeProblem& problem, const DecodePlan& plan,
              void* workspace) {
  params.max_length = static_cast<int>(problem.max_length);
  params.kv_heads = static_cast<int>(problem.kv_heads);
  params.group = static_cast<int>(problem.q_heads / problem.kv_heads);
  params.head_groups = plan.head_groups;
  params.parts = plan.parts;
  params.parts_log2 = 0;
  while (1 << params.parts_log2 < plan.parts) ++params.parts_log2;
  params.splits = plan.splits;
  if (plan.splits == 1) return;
  params.sums = static_cast<float*>(workspace);
  params.stats =
      reinterpret_cast<float2*>(params.sums + plan.grid * kDecodeHeads * problem.head_dim);
}

// Launch the planned kernel on `stream` of the current device, whose index `device` is.
void launch_decode(const DecodeParams<ContigKv>& params, const DecodePlan& plan, int head_dim,
                   int device, cudaStream_t stream);
void launch_decode(const DecodeParams<PagedKv>& params, const DecodePlan& plan, int head_dim,
                   int device, cudaStream_t stream);

}  // namespace astrai::attention
