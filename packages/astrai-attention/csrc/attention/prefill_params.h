// SPDX-License-Identifier: Apache-2.0
// What prefill kernels are given, and the policies that say which queries a CTA takes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/kv_source.cuh"
#include "attention/prefill_plan.h"

namespace astrai::attention {

// Queries [row, row + PrefillPlan::rows) of a sequence, those of them that exist, and a group of heads.
struct QWork {
  int batch;
  int group;      // of the heads of a CTA, among those of a token
  int row;        // the first query
  int q_len;      // of the sequence
  int64_t start;  // where the sequence begins along the rows of q
};

// A rectangular batch. The heaviest tiles come first (with a causal mask those at the end), in sections
// of groups whose K and V fit in L2 together.
struct DenseQSchedule {
  int q_len, tiles, rows;
  int groups;   // of the heads of a token
  int total;    // batch * groups
  int section;  // PrefillPlan::section

#if defined(__CUDACC__)
  __device__ __forceinline__ bool locate(int block, QWork& work) const {
    const int per_section = section * tiles;  // at most the grid
    const int which = block / per_section;
    const int within = block - which * per_section;
    const int first = which * section;
    const int width = min(section, total - first);
    const int tile = within / width;
    const int unit = first + within - tile * width;
    work.batch = unit / groups;
    work.group = unit - work.batch * groups;
    work.row = (tiles - 1 - tile) * rows;
    work.q_len = q_len;
    work.start = 0;
    return true;
  }
#endif
};

// Sequences of any lengths, one after the other, cut into tiles of kQTileRows by maps of the host.
struct PackedQSchedule {
  const int* qo_indptr;        // [batch + 1]
  const int* q_tile_to_batch;  // [tiles]
  const int* q_tile_to_index;
  int rows, groups, blocks;  // blocks: tiles * blocks_per_tile
  int blocks_per_tile, tiles_per_block;

#if defined(__CUDACC__)
  // False where the queries are another CTA's, or past the sequence.
  __device__ __forceinline__ bool locate(int block, QWork& work) const {
    const int place = block / groups;
    const int part = blocks - 1 - place;
    const int tile = part / blocks_per_tile;
    work.group = block - place * groups;
    work.batch = q_tile_to_batch[tile];
    const int index = q_tile_to_index[tile];
    const int start = qo_indptr[work.batch];
    work.q_len = qo_indptr[work.batch + 1] - start;
    work.start = start;
    work.row = index * kQTileRows + (part - tile * blocks_per_tile) * rows;
    return (index & (tiles_per_block - 1)) == 0 && work.row < work.q_len;
  }
#endif
};

// In elements; head_dim has stride 1 and rows start on 16 bytes.
struct QStrides {
  int64_t batch, row, head;
};

// True keeps a key. [batch, q_len, kv_len], keys with stride 1; null: no mask.
struct KeyMask {
  const uint8_t* data;
  int64_t batch_stride, row_stride;
};

// The output is rescaled when exponentials would exceed 2^8.
constexpr float kPrefillSlack = 8.0f;

template <class Schedule, class Kv>
struct PrefillParams {
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  float* lse;  // may be null; [batch, q_heads, rows]
  QStrides q_stride, out_stride;
  int64_t lse_batch, lse_head;
  Schedule schedule;
  Kv kv;
  KeyMask mask;
  float scale_log2;  // of the scores, times log2(e); positive
  float slack;  // by how much a score may exceed its row's reference; kPrefillSlack / scale_log2
  int heads_shift;  // PrefillPlan::heads_shift
  int group;        // query heads of a KV head
  bool causal;      // query i sees the keys up to kv_len - q_len + i
};

using DensePrefillParams = PrefillParams<DenseQSchedule, ContigKv>;
using PackedPrefillParams = PrefillParams<PackedQSchedule, PagedKv>;

// Launch the planned kernel on `stream` of the current device, whose index `device` is.
void launch_prefill(const DensePrefillParams& params, const PrefillPlan& plan, int head_dim,
                    int device, cudaStream_t stream);
void launch_prefill(const PackedPrefillParams& params, const PrefillPlan& plan, int head_dim,
                    int device, cudaStream_t stream);

}  // namespace astrai::attention
