// SPDX-License-Identifier: Apache-2.0
// A warp's part of decode attention on tensor cores.
//
// Tokens are the rows of both products, query heads of one KV head their 8 columns:
// S^T[token, head] = K Q^T, then O^T[d, head] += V^T P^T with mma.m16n8k16; the transposed probabilities
// cross lanes by movmatrix. Q's fragments stay in registers.
#pragma once

#include "astrai/device/mma.cuh"
#include "attention/decode_params.h"
#include "attention/tile_ops.cuh"

namespace astrai::attention {

// 8x8 matrix of bf16, transposed across the lanes of a warp.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t rows) {
  uint32_t columns;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// Columns 2t and 2t + 1 of lane t are two query heads.
template <int kDim>
struct MmaWarp {
  static constexpr int kHeadDim = kDim;
  static constexpr int kBlocks = decode_tile(kHeadDim) / 16;
  static constexpr int kTokens = 2 * kBlocks;  // of a tile, whose scores a lane has
  static constexpr int kRowBytes = 2 * kHeadDim;

  uint32_t q[kHeadDim / 16][2];  // of head lane / 4
  float o[kHeadDim / 16][4] = {};
  float maximum[2] = {kMinusInfinity, kMinusInfinity};  // of the scores in log2, over all lanes
  float sum[2] = {0.0f, 0.0f};                          // of this lane's tokens

  static __device__ __forceinline__ int token_of(int lane, int i) { return lane / 4 + i * 8; }

  // A piece of 16 bytes. Between this and load_q stands a barrier of the CTA.
  static __device__ __forceinline__ void put_q(char* smem, int head, int piece, uint4 value) {
    *reinterpret_cast<uint4*>(smem + tile_offset<kRowBytes>(head, piece)) = value;
  }

  __device__ __forceinline__ void load_q(const char* smem, int lane) {
    const uint32_t from = smem_address(smem);
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; j += 2) {
      uint32_t r[4];
      ldmatrix_x4(r, from + tile_offset<kRowBytes>(lane % 8, j * 2 + lane / 8));
      q[j][0] = r[0];
      q[j][1] = r[1];
      q[j + 1][0] = r[2];
      q[j + 1][1] = r[3];
    }
  }

  // Adds a tile: K at `k`, V at `v`.
  __device__ __forceinline__ void add(const bool (&keep)[kTokens], uint32_t k, uint32_t v,
                                      float scale_log2, int lane) {
    const uint32_t k_place = tile_offset<kRowBytes>(lane % 16, lane / 16);
    // Two chains: a dependent MMA waits for the one before it.
    float s[kBlocks][4];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float chains[2][4] = {};
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j) {
        uint32_t a[4];
        ldmatrix_x4(a, k + pieces_on(k_place, 2 * j) + b * 16 * kRowBytes);
        mma_m16n8k16_bf16(chains[j % 2], a[0], a[1], a[2], a[3], q[j][0], q[j][1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[b][i] = keep[2 * b + i / 2] ? (chains[0][i] + chains[1][i]) * scale_log2 : kMinusInfinity;
    }
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = maximum[h];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) most = fmaxf(most, fmaxf(s[b][h], s[b][h + 2]));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
      // Of a row that is masked so far every exponential is 0, not that of a NaN.
      const float base = most == kMinusInfinity ? 0.0f : most;
      scale[h] = exp2_fast(maximum[h] - base);
      maximum[h] = most;
      sum[h] *= scale[h];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        s[b][h] = exp2_fast(s[b][h] - base);
        s[b][h + 2] = exp2_fast(s[b][h + 2] - base);
        sum[h] += s[b][h] + s[b][h + 2];
      }
    }
    if (__any_sync(0xffffffffu, scale[0] != 1.0f || scale[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[j][i] *= scale[i % 2];
    }
    const uint32_t token = lane % 8 + lane / 16 * 8;
    const uint32_t base = v + tile_offset<kRowBytes>(token, lane / 8 % 2);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t p0 = transpose_8x8(pack_bf16(s[b][0], s[b][1]));
      const uint32_t p1 = transpose_8x8(pack_bf16(s[b][2], s[b][3]));
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j) {
        uint32_t a[4];
        ldmatrix_x4_trans(a, pieces_on(base, 2 * j) + b * 16 * kRowBytes);
        mma_m16n8k16_bf16(o[j], a[0], a[1], a[2], a[3], p0, p1);
      }
    }
  }

  // Into sums[head][pitch] and stats[head]: maximum, sum.
  __device__ __forceinline__ void put(float* sums, float2* stats, int pitch, int lane) const {
    const int g = lane / 4, t = lane % 4;
    float* to = sums + 2 * t * pitch + g;
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i % 2 * pitch + j * 16 + i / 2 * 8] = o[j][i];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[h];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        total += __shfl_xor_sync(0xffffffffu, total, distance);
      if (g == 0) stats[2 * t + h] = make_float2(maximum[h], total);
    }
  }
};

}  // namespace astrai::attention
