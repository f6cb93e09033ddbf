// SPDX-License-Identifier: Apache-2.0
// A warp's part of decode attention without tensor cores: what ASTRAI_NO_MMA builds in place of
// decode_mma.cuh, in the same grid and over the same tiles.
//
// Algorithm. A lane scores one token of a tile: of 32 tokens for all 8 query heads, of 16 for 4 of them.
// Maxima and sums cross lanes by shuffles. Then a lane has the outputs of head_dim / 32 neighbouring
// dimensions for all heads: each row of V is read once by the warp, the probabilities, rounded to bf16
// as for the MMAs, come from the lanes of the scores one token at a time.
//
// Shared memory. Beside the rings of decode_plan.h the queries in fp32, 8 rows for the whole CTA: lanes
// read the same address of them at a time.
//
// Floor. 4 * tokens * heads * head_dim operations outside the tensor cores, and a shuffle for each head and
// token.
#pragma once

#include "attention/decode_params.h"
#include "attention/tile_ops.cuh"

namespace astrai::attention {

template <int kDim>
struct ScalarWarp {
  static constexpr int kHeadDim = kDim;
  static constexpr int kTile = decode_tile(kHeadDim);
  static constexpr int kTokens = 1;                         // of a tile, whose scores a lane has,
  static constexpr int kHeads = kDecodeHeads * kTile / 32;  // for so many heads
  static constexpr int kDims = kHeadDim / 32;               // of a lane's outputs
  static constexpr int kRowBytes = 2 * kHeadDim;

  float o[kDecodeHeads][kDims] = {};
  float maximum[kHeads];  // of the scores in log2, over all lanes of a head
  float sum[kHeads];      // of this lane's tokens
  const float* q;         // of this lane's heads: [kHeads, head_dim]

  static __device__ __forceinline__ int token_of(int lane, int) { return lane % kTile; }

  // A piece of 16 bytes. Between this and load_q stands a barrier of the CTA.
  static __device__ __forceinline__ void put_q(char* smem, int head, int piece, uint4 value) {
    float x[8];
    unpack_8(value, x);
    auto* const to = reinterpret_cast<float4*>(smem) + (head * kHeadDim + piece * 8) / 4;
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  }

  __device__ __forceinline__ void load_q(const char* smem, int lane) {
    q = reinterpret_cast<const float*>(smem) + lane / kTile * kHeads * kHeadDim;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      maximum[h] = kMinusInfinity;
      sum[h] = 0.0f;
    }
  }

  // Adds a tile: K at `k`, V at `v`.
  __device__ __forceinline__ void add(const bool (&keep)[kTokens], uint32_t k, uint32_t v,
                                      float scale_log2, int lane) {
    float s[kHeads] = {};
#pragma unroll 4
    for (int piece = 0; piece < kHeadDim / 8; ++piece) {
      float x[8];
      load_8(k + tile_offset<kRowBytes>(lane % kTile, piece), x);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < 8; ++i) s[h] = fmaf(x[i], q[h * kHeadDim + piece * 8 + i], s[h]);
    }
    float scale[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      s[h] = keep[0] ? s[h] * scale_log2 : kMinusInfinity;
      float most = fmaxf(maximum[h], s[h]);
#pragma unroll
      for (int distance = 1; distance < kTile; distance *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
      // Of a row that is masked so far every exponential is 0, not that of a NaN.
      const float base = most == kMinusInfinity ? 0.0f : most;
      scale[h] = exp2_fast(maximum[h] - base);
      maximum[h] = most;
      s[h] = exp2_fast(s[h] - base);
      sum[h] = sum[h] * scale[h] + s[h];
      s[h] = round_to_bf16(s[h]);
    }
#pragma unroll
    for (int h = 0; h < kDecodeHeads; ++h) {
      const float factor = __shfl_sync(0xffffffffu, scale[h % kHeads], h / kHeads * kTile);
#pragma unroll
      for (int d = 0; d < kDims; ++d) o[h][d] *= factor;
    }
    struct alignas(2 * kDims) Dims {
      __nv_bfloat16 of[kDims];
    };
#pragma unroll 4
    for (int token = 0; token < kTile; ++token) {
      const uint32_t at = tile_offset<kRowBytes>(token, lane * kDims / 8) + lane * kDims % 8 * 2;
      const Dims row = *static_cast<const Dims*>(__cvta_shared_to_generic(v + at));
#pragma unroll
      for (int h = 0; h < kDecodeHeads; ++h) {
        const float weight = __shfl_sync(0xffffffffu, s[h % kHeads], h / kHeads * kTile + token);
#pragma unroll
        for (int d = 0; d < kDims; ++d)
          o[h][d] = fmaf(weight, __bfloat162float(row.of[d]), o[h][d]);
      }
    }
  }

  // Into sums[head][pitch] and stats[head]: maximum, sum.
  __device__ __forceinline__ void put(float* sums, float2* stats, int pitch, int lane) const {
#pragma unroll
    for (int h = 0; h < kDecodeHeads; ++h)
#pragma unroll
      for (int d = 0; d < kDims; ++d) sums[h * pitch + lane * kDims + d] = o[h][d];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float total = sum[h];
#pragma unroll
      for (int distance = 1; distance < kTile; distance *= 2)
        total += __shfl_xor_sync(0xffffffffu, total, distance);
      if (lane % kTile == 0) stats[lane / kTile * kHeads + h] = make_float2(maximum[h], total);
    }
  }
};

}  // namespace astrai::attention
