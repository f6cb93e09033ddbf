// SPDX-License-Identifier: Apache-2.0
// Prefill attention without tensor cores: what ASTRAI_NO_MMA builds in place of prefill_kernel.cuh, for
// the same plans.
//
// Algorithm. A lane owns a row, at head_dim 256 half of one, with its output in registers: the softmax of
// a row crosses no lanes. Keys come eight at a time: for each 16 bytes of the row's q, those of eight
// keys, which all lanes read at one address; then an online softmax step, whose reference moves as that
// of the MMA body does; then eight rows of V.
//
// Grid. That of prefill_kernel.cuh, see the schedules in prefill_params.h. Keys past those that the
// warp's last row may see are skipped.
//
// Shared memory. The tiles of prefill_plan.h, with the same copies: of two stages the next is under way
// during a whole step; one stage is refilled once all warps have read K and V.
//
// Floor. 4 * rows * keys * head_dim operations a head outside the tensor cores, and half as many to
// widen bf16.
#pragma once

#include "astrai/device/pdl.cuh"
#include "attention/prefill_cta.cuh"

namespace astrai::attention {

constexpr int kKeysAtOnce = 8;

// A lane's part of a row: `kDims` of head_dim from piece `first_piece` on.
template <int kHeadDim, int kDims>
struct ScalarRow {
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kPieces = kDims / 8;

  int row, first_piece;
  float out[kDims] = {};
  // Scores exceed `reference`, which is one of them, by at most the slack; -inf before the first key.
  float reference = kMinusInfinity;
  float sum = 0.0f;

  // score = q k^T for the keys at `k`, rows of a tile.
  __device__ __forceinline__ void multiply_k(uint32_t q_tile, uint32_t k,
                                             float (&score)[kKeysAtOnce]) const {
#pragma unroll
    for (int key = 0; key < kKeysAtOnce; ++key) score[key] = 0.0f;
#pragma unroll 1
    for (int piece = first_piece; piece < first_piece + kPieces; ++piece) {
      float q[8];
      load_8(q_tile + tile_offset<kRowBytes>(row, piece), q);
#pragma unroll
      for (int key = 0; key < kKeysAtOnce; ++key) {
        float x[8];
        load_8(k + tile_offset<kRowBytes>(key, piece), x);
#pragma unroll
        for (int i = 0; i < 8; ++i) score[key] = fmaf(q[i], x[i], score[key]);
      }
    }
    if constexpr (kDims < kHeadDim) {
#pragma unroll
      for (int key = 0; key < kKeysAtOnce; ++key)
        score[key] += __shfl_xor_sync(0xffffffffu, score[key], 16);
    }
  }

  // Moves the reference where scores have outgrown it; scores become probabilities, rounded to bf16.
  __device__ __forceinline__ void soften(float (&score)[kKeysAtOnce], float scale_log2,
                                         float slack) {
    float most = score[0];
#pragma unroll
    for (int key = 1; key < kKeysAtOnce; ++key) most = fmaxf(most, score[key]);
    if (most > reference + slack) {
      const float ratio = exp2_fast((reference - most) * scale_log2);
      reference = most;
      sum *= ratio;
#pragma unroll
      for (int d = 0; d < kDims; ++d) out[d] *= ratio;
    }
    const float shift = reference == kMinusInfinity ? 0.0f : -reference * scale_log2;
#pragma unroll
    for (int key = 0; key < kKeysAtOnce; ++key) {
      const float p = exp2_fast(fmaf(score[key], scale_log2, shift));
      sum += p;
      score[key] = round_to_bf16(p);
    }
  }

  // out += p v for the keys at `v`.
  __device__ __forceinline__ void multiply_v(uint32_t v, const float (&p)[kKeysAtOnce]) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int key = 0; key < kKeysAtOnce; ++key) {
        float x[8];
        load_8(v + tile_offset<kRowBytes>(key, first_piece + piece), x);
#pragma unroll
        for (int i = 0; i < 8; ++i) out[piece * 8 + i] = fmaf(p[key], x[i], out[piece * 8 + i]);
      }
  }
};

template <int kHeadDim, class Schedule, class Kv, bool kMasked>
__global__ void __launch_bounds__(kPrefillThreads, kPrefillCtasPerSm)
    prefill_scalar_kernel(const __grid_constant__ PrefillParams<Schedule, Kv> p) {
  using Shape = PrefillShape<kHeadDim, kMasked>;
  constexpr int kDims = kHeadDim * Shape::kWarpRows / 32;
  constexpr float kLn2 = 0.693147180559945309f;
  static_assert(Shape::kBlockN % kKeysAtOnce == 0);
  extern __shared__ __align__(1024) unsigned char prefill_smem[];

  pdl_launch_dependents();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t q_tile = smem_address(prefill_smem) + warp * Shape::kWarpRows * Shape::kRowBytes;
  const uint32_t kv_tiles = smem_address(prefill_smem) + Shape::kQBytes;

  pdl_wait();
  WarpPlace& place = warp_places<kHeadDim, kMasked>(prefill_smem)[warp];
  WarpWork work;
  if (!begin_warp<kHeadDim, kMasked>(p, q_tile, place, warp, lane, work)) return;
  KvLoader<kHeadDim, Kv, kMasked> loader(p.kv, place, work.batch, work.head / p.group,
                                         work.rows.kv_len, warp, lane);
  if (work.keys > 0) loader.template copy<true, true>(0, kv_tiles);
  cp_async_commit();

  ScalarRow<kHeadDim, kDims> state;
  state.row = lane % Shape::kWarpRows;
  state.first_piece = lane / Shape::kWarpRows * (kDims / 8);
  const bool exists = state.row < place.count;
  const int limit = work.rows.limit(state.row);
  const int last_limit = work.rows.limit(Shape::kWarpRows - 1);
  uint32_t stage = 0;
  for (int begin = 0; begin < work.keys; begin += Shape::kBlockN) {
    cp_async_wait<0>();
    __syncthreads();
    const int next = begin + Shape::kBlockN;
    if (Shape::kStages > 1 && next < work.keys) {
      loader.advance(next);
      loader.template copy<true, true>(next, kv_tiles + (stage ^ 2 * Shape::kKvBytes));
      cp_async_commit();
    }
    for (int key = 0; key < Shape::kBlockN && begin + key < last_limit; key += kKeysAtOnce) {
      const uint32_t k = kv_tiles + stage + key * Shape::kRowBytes;
      float score[kKeysAtOnce];
      state.multiply_k(q_tile, k, score);
#pragma unroll
      for (int i = 0; i < kKeysAtOnce; ++i) {
        bool kept = begin + key + i < limit;
        if constexpr (kMasked)
          kept = kept && exists && place.mask[state.row * p.mask.row_stride + begin + key + i] != 0;
        if (!kept) score[i] = kMinusInfinity;
      }
      state.soften(score, p.scale_log2, p.slack);
      state.multiply_v(k + Shape::kKvBytes, score);
    }
    if constexpr (Shape::kStages > 1) {
      stage ^= 2 * Shape::kKvBytes;
    } else if (next < work.keys) {
      __syncthreads();
      loader.advance(next);
      loader.template copy<true, true>(next, kv_tiles);
      cp_async_commit();
    }
  }

  // Rows that saw no key: 0, -inf, though 0 * NaN of V may be in the sums. A NaN is a sum of some.
  cp_async_wait<0>();
  if (!exists) return;
  const bool none = state.sum == 0.0f;
  const float inverse = none ? 0.0f : 1.0f / state.sum;
  if (p.lse != nullptr && state.first_piece == 0)
    p.lse[place.lse + state.row] =
        none ? kMinusInfinity : (state.reference * p.scale_log2 + log2f(state.sum)) * kLn2;
  auto* const out = reinterpret_cast<uint4*>(p.out + place.out + state.row * p.out_stride.row) +
                    state.first_piece;
#pragma unroll
  for (int piece = 0; piece < kDims / 8; ++piece) {
    const auto pair = [&](int i) {
      const float* x = state.out + piece * 8 + i;
      return none ? 0 : pack_bf16(x[0] * inverse, x[1] * inverse);
    };
    out[piece] = make_uint4(pair(0), pair(2), pair(4), pair(6));
  }
}

}  // namespace astrai::attention
