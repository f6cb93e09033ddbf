// SPDX-License-Identifier: Apache-2.0
// Rotary embedding (Su et al., 2021) of bf16 heads by fp32 angles:
//   out[i] = x[i] * cos - x[j] * sin;  out[j] = x[j] * cos + x[i] * sin;  one rounding to bf16
// with pairs (i, j) = (2i, 2i + 1) where interleaved, else (i, i + head_dim / 2).
//
// Algorithm. A thread takes the same place in up to kHeads heads of one token: 16 bytes of the head
// where interleaved, else 16 bytes of each half. All its loads are issued before the first
// use, the angles are loaded once for all its heads, and what it stores it alone has read, so that
// out may be x. Angles repeat across the heads of a token, which sit in one CTA: L1 serves them.
//
// Grid. blockDim is (vectors of a head, groups of heads, tokens), with the vector fastest: a warp
// reads whole rows. blockIdx.x tiles tokens, blockIdx.y tiles groups. One division is left (token
// into batch and position), and it precedes griddepcontrol.wait.
//
// Shared memory. None. Floor. 4 bytes per element of x, and 4 * head_dim per token for the angles:
// bandwidth from some MB on, the launch below that. With 4 heads a thread, registers admit 768
// threads of 128 bytes of x each to an SM (interleaved: 1,536 of 64): 96 KB in flight, where HBM3e
// needs about 30.
#pragma once

#include "astrai/device/pdl.cuh"
#include "rotary/rotary.h"

namespace astrai::attention {

// 8 bf16. In words: an array of __nv_bfloat162 is copied, and so loaded, one element at a time.
struct alignas(16) Piece {
  uint32_t pair[4];
};

__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ __forceinline__ uint32_t pack(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

// kCount consecutive angles, in 16-byte loads.
template <int kCount>
__device__ __forceinline__ void load_angles(float (&angles)[kCount], const float* source) {
  static_assert(kCount % 4 == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(source + i);
    angles[i] = four.x;
    angles[i + 1] = four.y;
    angles[i + 2] = four.z;
    angles[i + 3] = four.w;
  }
}

// 4 pairs: each word holds one.
__device__ __forceinline__ void rotate_interleaved(Piece& piece, const float (&cos)[4],
                                                   const float (&sin)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack(piece.pair[i]);
    piece.pair[i] = pack(x.x * cos[i] - x.y * sin[i], x.y * cos[i] + x.x * sin[i]);
  }
}

// 8 pairs: the first of each in `low`, the second in `high`.
__device__ __forceinline__ void rotate_halves(Piece& low, Piece& high, const float (&cos)[8],
                                              const float (&sin)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack(low.pair[i]);
    const float2 b = unpack(high.pair[i]);
    const float c0 = cos[2 * i], c1 = cos[2 * i + 1], s0 = sin[2 * i], s1 = sin[2 * i + 1];
    low.pair[i] = pack(a.x * c0 - b.x * s0, a.y * c1 - b.y * s1);
    high.pair[i] = pack(b.x * c0 + a.x * s0, b.y * c1 + a.y * s1);
  }
}

template <bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kRotaryThreads)
    rotary_kernel(const __grid_constant__ RotaryParams p, int groups) {
  constexpr int kPieces = kInterleaved ? 1 : 2;  // of 16 bytes, in each head
  constexpr int kAngles = kInterleaved ? 4 : 8;

  pdl_launch_dependents();
  const int64_t token = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  const int group = blockIdx.y * blockDim.y + threadIdx.y;
  const int64_t batch = static_cast<unsigned>(token) / static_cast<unsigned>(p.seq);
  const int64_t position = token - batch * p.seq;
  const int64_t first = 8 * threadIdx.x;
  const int64_t angle = kAngles * threadIdx.x;
  const __nv_bfloat16* x = p.x + batch * p.x_stride.batch + position * p.x_stride.seq + first;
  __nv_bfloat16* out = p.out + batch * p.out_stride.batch + position * p.out_stride.seq + first;
  const float* cos_row = p.cos + batch * p.cos_stride.batch + position * p.cos_stride.seq + angle;
  const float* sin_row = p.sin + batch * p.sin_stride.batch + position * p.sin_stride.seq + angle;
  const int half = p.head_dim / 2;

  // Threads past the edge wait too: a CTA of them alone must not end before its predecessor.
  pdl_wait();
  if (token >= p.tokens || group >= groups) return;

  Piece piece[kHeads][kPieces];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = group + h * groups;
    if (h > 0 && head >= p.heads) continue;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      piece[h][i] = *reinterpret_cast<const Piece*>(x + head * p.x_stride.head + i * half);
  }
  float cos[kAngles], sin[kAngles];
  load_angles(cos, cos_row);
  load_angles(sin, sin_row);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = group + h * groups;
    if (h > 0 && head >= p.heads) continue;
    if constexpr (kInterleaved)
      rotate_interleaved(piece[h][0], cos, sin);
    else
      rotate_halves(piece[h][0], piece[h][1], cos, sin);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      *reinterpret_cast<Piece*>(out + head * p.out_stride.head + i * half) = piece[h][i];
  }
}

}  // namespace astrai::attention
