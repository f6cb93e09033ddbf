// SPDX-License-Identifier: Apache-2.0
// Small-M linear: out[m, n] = sum_k x[m, k] * weight[n, k], M = 1..8 tokens, bf16 in, fp32 accumulate.
//
// Algorithm. The tokens are the 8-wide N operand of mma.m16n8k16 (columns at or above M are zero), 16
// weight rows the A operand. A dot product does not care about the order of k, so the 16 bytes that a
// lane reads of row g (g = lane / 4) are its A fragments as they are, and the same 16 bytes of token g
// its B fragments: no transposition, no ldmatrix.
//
// Segments. Up to 4 tokens leave half of the columns free. Those hold the same tokens at other k: of the 64
// k that a tile advances by, columns 0..3 have the first 32 and columns 4..7 the last (kSegments = 2), and A is 8
// weight rows with both halves. That takes as many MMAs, of whose results a row's own segment is kept.
// x takes half of the registers and comes by whole lines. One segment adds the same products in the same order,
// so that a token's result does not depend on M. kUnaligned has one.
//
// Grid. One CTA per SM (two where a chain of kernels needs it: gemv_plan.cpp), each with an equal,
// contiguous range of rows, walked in blocks of 4 tiles of up to 16 rows, all of one size. The 8 warps take
// chunks of 128 k in turn, so a CTA sweeps its rows in order. A lane keeps the x of 4 chunks (a window) in
// registers, of two segments also that of two windows (kHeld): all of it for K <= 4,096, or 8,192 (kResident),
// else one window after the other serves all tiles of a block; the first comes by loads, the later ones through
// the ring, where they are due (kUnaligned: by loads too). A longer K of few rows is shared by a cluster
// (kSplit), whose CTAs send one another the sums of the tiles that are the other's to finish. The partial sums
// of the windows, then of the warps, then of the CTAs, are added in a fixed order through shared memory.
//
// Registers. All 128 that two CTAs for an SM leave to a thread, and on sm_90 none spilled but for kUnaligned with
// windows: a spilled one costs 0.5 us. What is the same for a warp is read from one lane, for the compiler to have it
// in uniform registers.
//
// Shared memory. Each warp has a ring of its own, filled by cp.async: the main loop has no CTA
// barrier. 8 warps x (6 slots x 2 KB + 2 KB of sums + a word) on sm_90: see gemv_traits.h for what fits and why.
//
// Row sources. kAligned: rows start on 16 bytes. kUnaligned: any K and storage offset. Rows whose numbers
// differ by a multiple of 8 start alike past 16 bytes, so a CTA takes rows of one such class, from their
// first 16-byte boundary on; x is shifted once, when it is loaded, and one MMA adds the up to 7 elements
// before the boundary. kSwiglu: rows 0..7 of a tile are `up`, rows 8..15 the same rows of `gate`, so
// both projections of an output meet in one lane.
//
// Dependent launch. By default every read follows griddepcontrol.wait. With static_weights the ring is
// filled, and kPrefetchBytes more per CTA are brought to L2, before it: HBM stays busy while the
// preceding kernel ends and x arrives, which takes 2 to 3 us. The weights are read with evict_first, so
// that the stream does not push out what was prefetched (nor x).
//
// Floor. n * k * 2 bytes of weights at the read bandwidth; the tokens come from L2.
//
// What lost. A lane copying only what it reads back (64 bytes of a row per request): 3.8 TB/s where 128 and
// 256 bytes reach 4.5, because a DRAM page is left before it is used up. cp.async's L2 prefetch hints: 8 %
// slower on contiguous sweeps. Prefetching to L2 without evict_first: 14 % slower at 4096 x 4096. Clusters
// of several blocks: 0.7 us for the sums of each, 10 % slower at 28672 x 8192. Clusters where x fits
// without them: in a chain of its own kind 1024 x 4096 takes a quarter less, but between other kernels 1 to
// 2 us more (a layer of an 8B Llama 113.0 us instead of 110.7, a decode step of a 1B one 1 % longer).
// Reloading x at each block where it could stay: at M = 8 its loads queue behind the ring's, 1 us each
// time. Two half-size windows, one loaded while the other is used: 2 % slower, the rows' sweeps get
// shorter. Launching dependents when the last tile, or the two or three last ones, are left, so that their
// rings fill while this kernel drains: 3 to 20 % slower in chains. Bringing weights that are not static to
// L2 before the wait: 1 to 5 % slower. Loading each window when it is due, instead of through the ring: 1
// to 7 % slower for K > 4,096. There, blocks of 8 tiles with a ring of 5 slots: 1 to 4 % slower, but at M =
// 8 over 28672 x 8192 1 % faster. Blocks of 16 tiles at M <= 2, by keeping no sums of absent tokens: 1 to 5
// % slower. Slots of a whole chunk: no change. Walking through the code once before the wait, for the
// instruction cache: nothing gained after it, 0.4 us lost to the later start. Half as many CTAs with full
// tiles at 1024 x 4096: 13 % slower. Shifting weights in registers instead of sorting rows into classes: 20
// % slower at M = 8. In a decode step of a 1B Llama: an RMSNorm of x and a residual of the output in this
// kernel, instead of kernels between: 1 % slower; later layers' weights brought to L2 during attention: 2
// to 10 % slower; 120 registers, so that a norm's CTA fits beside two of these: 5 % slower. Two CTAs for
// each SM: at M = 1 2 to 4 % faster for 34 to 117 MB of weights but 18 % slower for 2,048 x 2,048, at M = 8
// 2 to 12 % slower. x of two tokens through shared memory, by loads, cp.async or bulk copies: a row 8 to 19 %
// slower, chains 1 to 3 %. Two segments as words 0 and 2 and words 1 and 3 of each 16 bytes, so that what a lane
// reads is in the order of the MMA's registers: 1 % faster where much is read, but lanes must exchange x, a row 9 %
// slower, K > 8,192 2 to 5 %. Reading alone, 525 MB take 115.3 us with these copies, 114.2 with bulk copies of 2 KB
// of a row, of which an MMA could not be fed, 127.6 with TMA's of 16 rows x 128 bytes.
#pragma once

#include "astrai/device/async_copy.cuh"
#include "astrai/device/cluster.cuh"
#include "astrai/device/image_arch.cuh"
#include "astrai/device/mma.cuh"
#include "astrai/device/pdl.cuh"
#include "gemv/gemv_params.h"
#include "gemv/gemv_plan.h"
#include "gemv/gemv_ring.cuh"
#include "gemv/gemv_traits.h"
#include "gemv/gemv_x.cuh"

namespace astrai::gemv {

constexpr int kBarrierAt = buffer_bytes(kImageArch);
static_assert(kStages % 2 == 0, "slots hold the halves of chunks in turn");
static_assert(kStages <= 6, "x must not be copied before the wait: a first window has 3 chunks");

__device__ __forceinline__ float round_bf16(float value) {
  return __bfloat162float(__float2bfloat16_rn(value));
}

__device__ __forceinline__ float silu_bf16(float gate) {
  const float g = round_bf16(gate);
  return round_bf16(g / (1.0f + __expf(-g)));
}

// The products of the last row's elements past its last whole 16-byte block, which no copy brought.
__device__ __forceinline__ float last_elements(const GemvParams& p, int token, int head) {
  const __nv_bfloat16* row = p.weight + (p.n - 1) * p.row_stride;
  float sum = 0.0f;
#pragma unroll 1
  for (int k = max(head, p.k - bytes_past_16(row + p.k) / 2); k < p.k; ++k)
    sum += __bfloat162float(row[k]) * __bfloat162float(__ldcg(p.x + token * p.k + k));
  return sum;
}

// Where a warp leaves the sums of row g, tokens 2t and 2t + 1, and of row g + 8: four floats. The
// exchange of t lets 16 rows of a token be read without bank conflicts.
__device__ __forceinline__ int sum_slot(int g, int t) { return g * 4 + (t ^ (g / 2)); }

// Sums of both segments, as sum_slot has them. One segment of columns: the MMAs of each half of a line have sums
// of their own. Two: a lane's sums count where its columns are of its rows' segment, g < 4 and t < 2 or neither,
// and lanes (g, t) and (g ^ 4, t ^ 2) exchange; lanes g < 4 get rows g and g + 8, the others the same of tokens
// 2t - 4 and 2t - 3.
template <int kSegments>
__device__ __forceinline__ float4 sum_segments(int lane, const float (&acc)[2][4]) {
  if constexpr (kSegments == 1)
    return make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2],
                       acc[0][3] + acc[1][3]);
  const bool second = lane & 16;
  float sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float upper = acc[i / 2][i % 2], lower = acc[i / 2][2 + i % 2];
    const float its = __shfl_xor_sync(0xffffffffu, second ? upper : lower, 18);
    sum[i] = (second ? lower : upper) + its;
  }
  return make_float4(sum[0], sum[1], sum[2], sum[3]);
}

template <RowSource kSource, bool kResident, bool kSplit, int kSegments, int kHeld>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    gemv_kernel(const __grid_constant__ GemvParams p) {
  // No plan asks for clusters there.
  if constexpr (kSplit && kImageArch < 90) {
    __trap();
    return;
  }
  constexpr int kOutputs = kBlockTiles * kTileFloats / kThreads;
  constexpr bool kSwiglu = kSource == RowSource::kSwiglu;
  constexpr bool kUnaligned = kSource == RowSource::kUnaligned;
  // Producer: a lane's place in a slot and the slot's address have no bit in common.
  extern __shared__ __align__(512) char smem[];
  float* sums = reinterpret_cast<float*>(smem + kWarps * kStages * kSlotBytes);

  pdl_launch_dependents();

  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int rank = kSplit ? cluster_rank() : 0;
  const Rows<kSource> all(p, kSplit ? p.parts : 1, rank);
  const int chunks = ((all.k + kChunk - 1) / kChunk - warp + kWarps - 1) / kWarps;
  const uint32_t ring = smem_address(smem) + warp * kStages * kSlotBytes;
  // One segment: row g's piece t of a slot; two: row g % 4's piece t or t + 4. Odd rows hold them swapped.
  const Column<kSegments> column(lane);
  const uint32_t piece =
      ring + column.token * 128 + ((lane % 4 + column.segment * 4) ^ (column.token % 2 * 4)) * 16;

  // A cluster has one block. The CTA of rank r finishes its tiles r, r + parts, ...
  const uint32_t barrier = smem_address(smem) + kBarrierAt;
  if (kSplit && threadIdx.x == 0) {
    const int mine = (all.tiles_of_block(all.begin) - rank + p.parts - 1) / p.parts;
    init_inbox(barrier, p.parts * mine * ((p.m + 1) / 2) * 32 * int{sizeof(float)});
  }

  Producer<kSource, kResident, kSegments, kHeld> producer(p, all, lane, warp, chunks, ring);
  const auto fill_ring = [&] {
#pragma unroll
    for (int i = 0; i < kStages; ++i)
      i % 2 == 0 ? producer.template issue<0>(i * kSlotBytes)
                 : producer.template issue<1>(i * kSlotBytes);
  };
  Windows<kSegments, kHeld> x;
  // Not kSwiglu, whose calls of 8 tokens take 2 to 4 % longer with the exchange.
  constexpr bool kLines = kSource == RowSource::kAligned && kSegments == 1;
  const auto loads = [&] {
    if constexpr (kUnaligned)
      return XWords{p, all, warp, lane};
    else if constexpr (kLines)
      return XLines(p, all.offset, all.k, warp, lane);
    else
      return XLoads<kSegments>(p, all.offset, all.k, warp, lane);
  }();
  constexpr bool kWholeWindow = kResident && kHeld == 1;
  const auto load_x = [&](int window) {
#pragma unroll
    for (int w = 0; w < kHeld; ++w)
#pragma unroll
      for (int c = 0; c < kWindow; ++c) {
        if (!kWholeWindow && c >= p.window) break;
        loads.load(window + w * p.window + c, x[w][c]);
      }
  };
  const auto await_x = [&] {
    if constexpr (kLines)
#pragma unroll
      for (int c = 0; c < kWindow; ++c)
        if ((kWholeWindow || c < p.window) && c < chunks) exchange(lane, x[0][c]);
    if constexpr (kUnaligned && !kResident) wait_for(x[0]);
  };
  int at = 0;  // in the ring: what is read now, and refilled then
  const auto next_slot = [&] {
    at = at + kSlotBytes == kStages * kSlotBytes ? 0 : at + kSlotBytes;
  };
  const auto take_x = [&] {
#pragma unroll 1
    for (int pair = 0; pair < kXSlots<kSegments>; pair += 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        cp_async_wait<kStages - 1>();
        __syncwarp();
        if (column.token / 2 == pair + half) read_window<kSegments>(ring + at, lane, x[0]);
        __syncwarp();
        half == 0 ? producer.template issue<0>(at) : producer.template issue<1>(at);
        next_slot();
      }
    }
  };

  if (p.static_weights) {
    fill_ring();
    prefetch_rows<kSource, kHeld>(p, all);
  }
  pdl_wait();
  load_x(0);
  if (!p.static_weights) fill_ring();
  await_x();
  // The last warp has the fewest chunks.
  const bool adds_head = kUnaligned && warp == kWarps - 1;
  uint32_t head_x = 0;
  if (adds_head && lane / 4 < p.m)
    head_x = load_pair<false>(p.x + lane / 4 * p.k + lane % 4 * 2, all.head - lane % 4 * 2);

  // The block's first row, of which the warp's word has room where registers have none.
  int row_register = all.begin;
  volatile int* const row_word = reinterpret_cast<int*>(smem + kBarrierAt + kBarrierBytes) + warp;
  const auto block_row = [&] { return kFewRegisters<kSegments, kHeld> ? *row_word : row_register; };
  const auto set_block_row = [&](int row) {
    if constexpr (kFewRegisters<kSegments, kHeld>) {
      __syncwarp();
      if (lane == 0) *row_word = row;
      __syncwarp();
    } else {
      row_register = row;
    }
  };
  for (set_block_row(all.begin); block_row() < all.end;
       set_block_row(block_row() + kBlockTiles * all.per_tile)) {
    const int tiles = all.tiles_of_block(block_row());
    // One pass at least: a warp without chunks contributes zeros.
    for (int window = 0; window == 0 || window < chunks; window += kHeld * p.window) {
      if (!kResident && (block_row() > all.begin || window > 0)) {
        if (kRingX<kSource, kResident>) {
          if (window < chunks) take_x();
        } else {
          load_x(window);
          await_x();
        }
      }
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        uint32_t head[2] = {};
        if (adds_head && window == 0) {
          const int row = block_row() + tile * all.per_tile + lane / 4;
          const __nv_bfloat16* from = all.weight + row * all.stride - all.head + lane % 4 * 2;
          const int left = all.head - lane % 4 * 2;
          head[0] = load_pair<false>(from, row < all.end ? left : 0);
          head[1] = load_pair<false>(from + 8 * all.stride, row + 8 < all.end ? left : 0);
        }
        float4* sum = reinterpret_cast<float4*>(sums + (warp * kBlockTiles + tile) * kTileFloats) +
                      sum_slot(lane / 4, lane % (4 / kSegments));
        const bool has_sum = kSegments == 1 || lane / 16 == lane / 2 % 2;
        // The windows' sums by themselves, however many are held.
#pragma unroll
        for (int w = 0; w < kHeld; ++w) {
          if (w > 0 && window + w * p.window >= chunks) break;
          // Two chains: a dependent MMA waits for the one before it.
          float acc[2][4] = {};
#pragma unroll
          for (int c = 0; c < kWindow; ++c) {
            if (window + w * p.window + c >= chunks) break;
            if (!kWholeWindow && c >= p.window) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              cp_async_wait<kStages - 1>();
              __syncwarp();
              // One segment: pieces t and t + 4, each of rows g and g + 8. Two: rows g % 4 and + 8, and the
              // ones 4 later.
              constexpr int kNext = kSegments == 1 ? 1024 : 512;
              uint4 a[2][2];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const uint32_t from = (kSegments == 1 ? piece ^ i * 64 : piece + i * 1024) + at;
                a[i][0] = ld_shared_16(from);
                a[i][1] = ld_shared_16(from + kNext);
              }
              // All lanes have read the slot that is refilled now.
              __syncwarp();
              half == 0 ? producer.template issue<0>(at) : producer.template issue<1>(at);
              next_slot();
              const uint4(&b)[4 / kSegments] = x[w][c];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const uint4 &g = a[i][0], &h = a[i][1],
                            &v = b[kSegments == 1 ? half * 2 + i : half];
                mma_m16n8k16_bf16(acc[i], g.x, h.x, g.y, h.y, v.x, v.y);
              }
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const uint4 &g = a[i][0], &h = a[i][1],
                            &v = b[kSegments == 1 ? half * 2 + i : half];
                mma_m16n8k16_bf16(acc[i], g.z, h.z, g.w, h.w, v.z, v.w);
              }
            }
          }
          if (w == 0 && adds_head) mma_m16n8k16_bf16(acc[0], head[0], head[1], 0, 0, head_x, 0);
          float4 total = sum_segments<kSegments>(lane, acc);
          if (!has_sum) continue;
          if (w > 0 || (!kResident && window > 0)) {
            const float4 before = *sum;
            total.x += before.x;
            total.y += before.y;
            total.z += before.z;
            total.w += before.w;
          }
          *sum = total;
        }
      }
    }

    // Half a warp finishes 16 rows of a token: 32 bytes of output that lie together.
    const int in_tile = lane % kTileRows;
    const auto sum_of_warps = [&](int tile, int pair) {
      const float* partial = sums + tile * kTileFloats + sum_slot(in_tile % 8, pair) * 4 +
                             in_tile / 8 * 2 + lane / kTileRows;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += partial[w * kBlockTiles * kTileFloats];
      return sum;
    };
    __syncthreads();
    // By the rank of who sent.
    float* const inbox = reinterpret_cast<float*>(smem) + threadIdx.x;
    if constexpr (kSplit) {
      // The rings are empty: the others may send there, once they are at this point too. What was read from
      // them is in the sums that the barrier has passed on, so that a relaxed arrival comes after.
      cluster_arrive();
      float total[kOutputs];
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int tile = (warp + i * kWarps) / 4;
        const int pair = (warp + i * kWarps) % 4;
        if (tile < tiles && pair * 2 < p.m) total[i] = sum_of_warps(tile, pair);
      }
      cluster_wait();
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int tile = (warp + i * kWarps) / 4;
        if (tile < tiles && (warp + i * kWarps) % 4 * 2 < p.m)
          send(smem_address(inbox + (rank * kOutputs + i) * kThreads), barrier, tile % p.parts,
               total[i]);
      }
      wait_for_inbox(barrier);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int tile = (warp + i * kWarps) / 4;
      const int pair = (warp + i * kWarps) % 4;
      const int token = pair * 2 + lane / kTileRows;
      if (tile >= tiles || pair * 2 >= p.m) continue;
      float sum = 0.0f;
      if constexpr (kSplit) {
        if (tile % p.parts != rank) continue;
        for (int r = 0; r < p.parts; ++r) sum += inbox[(r * kOutputs + i) * kThreads];
      } else {
        sum = sum_of_warps(tile, pair);
      }
      if (kSwiglu) {
        const float gate = __shfl_down_sync(0xffffffffu, sum, 8);
        sum = round_bf16(sum) * silu_bf16(gate);
      }
      const int row = block_row() + tile * all.per_tile + in_tile;
      if (in_tile >= all.per_tile || row >= all.end || token >= p.m) continue;
      const int output = all.output(row);
      if (kUnaligned && output == p.n - 1) sum += last_elements(p, token, all.head);
      if (p.bias != nullptr) sum += __bfloat162float(__ldcg(p.bias + output));
      p.out[int64_t{token} * p.n + output] = __float2bfloat16_rn(sum);
    }
    __syncthreads();
  }
}

}  // namespace astrai::gemv
