// SPDX-License-Identifier: Apache-2.0
// x of the small-M linear kernel: from global memory to the registers where the MMA wants it.
//
// What every CTA reads at once comes from few places of L2, each as many times as there are requests for its
// line, 2 to 3 cycles apart: 4,096 elements of a token reach 128 CTAs after 1,800 cycles by 64 bytes a load, which
// is how the MMA has x of 8 tokens, and after 680 by 256. Loads of a whole line, 128 bytes, are what two segments
// have anyway, and one segment after lanes exchange.
#pragma once

#include "astrai/device/async_copy.cuh"
#include "gemv/gemv_params.h"
#include "gemv/gemv_ring.cuh"
#include "gemv/gemv_traits.h"

namespace astrai::gemv {

// kHeld windows of x: of a chunk, the lane has 4 / kSegments pieces of 16 bytes, piece i from
// element i * 32 * kSegments + segment * 32 + lane % 4 * 8 on; see gemv_kernel.cuh for its token and segment.
template <int kSegments, int kHeld>
using Windows = uint4[kHeld][kWindow][4 / kSegments];

// 16 bytes, or zeros. Where it stands, and not where they are used: the compiler would put it between refills of
// the ring.
__device__ __forceinline__ uint4 load_16(const char* from, bool valid) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 "
      "%3, 0;"
      " @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(int{valid}));
  return v;
}

// Has the compiler compute an address here, before the wait, and keep it: where it is used again, a register
// that loads have not read yet would be in the way.
__device__ __forceinline__ void pin(const char*& address) { asm volatile("" : "+l"(address)); }

// A lane's token and its segment, an eighth of the warp for each.
template <int kSegments>
struct Column {
  const int token, segment;
  __device__ __forceinline__ explicit Column(int lane)
      : token(lane / 4 % (8 / kSegments)), segment(lane / (32 / kSegments)) {}
};

// By whole lines of two segments, by half ones of one.
template <int kSegments>
struct XLoads {
  const char* from;
  int left;  // elements from there to the row's end; none for an absent token

  __device__ __forceinline__ XLoads(const GemvParams& p, int offset, int k, int warp, int lane) {
    const Column<kSegments> column(lane);
    const int first = warp * kChunk + column.segment * 32 + lane % 4 * 8;
    from = reinterpret_cast<const char*>(p.x + column.token * p.k + offset + first);
    left = column.token < p.m ? k - first : 0;
    pin(from);
  }

  // Chunk c of the warp.
  __device__ __forceinline__ void load(int c, uint4 (&x)[4 / kSegments]) const {
#pragma unroll
    for (int i = 0; i < 4 / kSegments; ++i) {
      const int at = c * kWarps * kChunk + i * 32 * kSegments;
      x[i] = load_16(from + 2 * at, at < left);
    }
  }
};

// By whole lines for one segment: 8 lanes read a line of two tokens each, for lanes 4 apart to exchange.
struct XLines {
  const char* from;    // of the lane's first token
  const char* second;  // of the next one
  int tokens;          // from the first one on
  int left;            // elements from there to the row's end

  __device__ __forceinline__ XLines(const GemvParams& p, int offset, int k, int warp, int lane) {
    const int token = lane / 8 * 2;
    const int first = warp * kChunk + lane % 8 * 8;
    from = reinterpret_cast<const char*>(p.x + token * p.k + offset + first);
    second = from + 2 * p.k;
    tokens = p.m - token;
    left = k - first;
    pin(from);
    pin(second);
  }

  // Chunk c of the warp.
  __device__ __forceinline__ void load(int c, uint4 (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = c * kWarps * kChunk + i / 2 * 64;
      x[i] = load_16((i % 2 ? second : from) + 2 * at, i % 2 < tokens && at < left);
    }
  }
};

// From lines to the pieces of token lane / 4.
__device__ __forceinline__ void exchange(int lane, uint4 (&x)[4]) {
  const bool second = lane & 4;
#pragma unroll
  for (int line = 0; line < 2; ++line) {
    uint32_t* first = reinterpret_cast<uint32_t*>(&x[line * 2]);
    uint32_t* other = reinterpret_cast<uint32_t*>(&x[line * 2 + 1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t mine = second ? other[i] : first[i];
      const uint32_t its = __shfl_xor_sync(0xffffffffu, second ? first[i] : other[i], 4);
      first[i] = second ? its : mine;
      other[i] = second ? mine : its;
    }
  }
}

// Two elements, as far as `left` reaches, else zeros. kWord: they start on 4 bytes.
template <bool kWord>
__device__ __forceinline__ uint32_t load_pair(const __nv_bfloat16* pair, int left) {
  const auto* e = reinterpret_cast<const unsigned short*>(pair);
  uint32_t both = 0;
  if (kWord && left > 1) both = __ldca(reinterpret_cast<const uint32_t*>(e));
  const uint32_t low = left == 1 || (!kWord && left > 1) ? __ldca(e) : 0;
  const uint32_t high = !kWord && left > 1 ? __ldca(e + 1) : 0;
  return both | low | high << 16;
}

// kUnaligned: the pieces of token lane / 4 from any boundary, word by word.
struct XWords {
  const GemvParams& p;
  const Rows<RowSource::kUnaligned>& all;
  int warp, lane;

  // Chunk c of the warp, if it is there.
  __device__ __forceinline__ void load(int c, uint4 (&x)[4]) const {
    const int token = lane / 4;
    const int chunk = (warp + c * kWarps) * kChunk;
    if (chunk >= all.k) return;
    const int k = chunk + lane % 4 * 8;
    const __nv_bfloat16* from = p.x + token * p.k + all.offset + all.head + k;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece, from += 32) {
      const int left = token < p.m ? all.k - k - piece * 32 : 0;
      const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(from) / 2 % 2);
      uint32_t before = odd && left > 0 ? __ldca(reinterpret_cast<const unsigned short*>(from)) : 0;
      uint32_t* w = reinterpret_cast<uint32_t*>(&x[piece]);
      before <<= 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int most = min(left, 8) - odd - 2 * i;
        const uint32_t word = load_pair<true>(from + odd + 2 * i, most);
        w[i] = odd ? __funnelshift_l(before, word, 16) : word;
        before = word;
      }
    }
  }
};

// A window of two tokens from the ring slot where Producer::copy_x has put it.
template <int kSegments>
__device__ __forceinline__ void read_window(uint32_t slot, int lane,
                                            uint4 (&x)[kWindow][4 / kSegments]) {
  const Column<kSegments> column(lane);
  const int odd = column.token % 2;
#pragma unroll
  for (int c = 0; c < kWindow; ++c)
#pragma unroll
    for (int i = 0; i < 4 / kSegments; ++i)
      x[c][i] = ld_shared_16(
          slot + odd * 1024 +
          ((c * 16 + (i * kSegments + column.segment) * 4 + lane % 4) ^ (odd * 4)) * 16);
}

// Holds a warp until XWords' x is there: something must use it, if only to sleep no time. Without it the compiler
// puts loads where x is used, between refills of the ring, which has cost aligned rows of 14,336 4 %.
__device__ __forceinline__ void wait_for(const uint4 (&x)[kWindow][4]) {
  uint32_t any = 0;
#pragma unroll
  for (int c = 0; c < kWindow; ++c) any |= x[c][3].w;
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 1; @p nanosleep.u32 0; }" ::"r"(any) : "memory");
}

}  // namespace astrai::gemv
