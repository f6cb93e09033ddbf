// SPDX-License-Identifier: Apache-2.0
// Small-M linear: out[m, n] = sum_k x[m, k] * weight[n, k], M = 1..8 tokens, bf16 in, fp32 accumulate.
//
// Algorithm. The tokens are the 8-wide N operand of mma.m16n8k16 (columns at or above M are zero), 16
// weight rows the A operand. A dot product does not care about the order of k, so the 16 bytes that a
// lane reads of row g (g = lane / 4) are its A fragments as they are, and the same 16 bytes of token g
// its B fragments: no transposition, no ldmatrix.
//
// Grid. One CTA per SM (two where a chain of kernels needs it: gemv_plan.cpp), each with an equal,
// contiguous range of rows, walked in blocks of 4 tiles of up to 16 rows, all of one size. The 8 warps take
// chunks of 128 k in turn, so a CTA sweeps its rows in order. A lane keeps the x of 4 chunks (a window) in
// registers: all of it for K <= 4,096 (kResident), else one window after the other serves all tiles of a
// block; the first comes by loads, the later ones through the ring, where they are due (kUnaligned: by
// loads too). A longer K of few rows is shared by a cluster (kSplit), whose CTAs send one another the sums
// of the tiles that are the other's to finish. The partial sums of the windows, then of the warps, then of
// the CTAs, are added in a fixed order through shared memory.
//
// Shared memory. Each warp has a ring of its own, filled by cp.async: the main loop has no CTA
// barrier. 8 warps x (6 slots x 2 KB + 2 KB of sums) on sm_90: see gemv_traits.h for what fits and why.
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
// 2 to 12 % slower.
#pragma once

#include "astrai/device/async_copy.cuh"
#include "astrai/device/cluster.cuh"
#include "astrai/device/mma.cuh"
#include "astrai/device/pdl.cuh"
#include "gemv/gemv_params.h"
#include "gemv/gemv_plan.h"
#include "gemv/gemv_traits.h"

namespace astrai::gemv {

#if defined(__CUDA_ARCH__)
constexpr int kImageArch = __CUDA_ARCH__ / 10;
#else
constexpr int kImageArch = 80;
#endif

constexpr int kStages = stages_for(kImageArch);
constexpr int kBarrierAt = smem_bytes(kImageArch);
static_assert(kStages % 2 == 0, "slots hold the halves of chunks in turn");
static_assert(kStages <= 6, "x must not be copied before the wait: a first window has 3 chunks");

// Where only one CTA fits, registers are free.
constexpr int kCtasPerSm = kImageArch >= 90 && kImageArch < 120 ? 2 : 1;

// 96 KB are no better at any shape, and worse at 4,096 x 4,096.
constexpr int kPrefetchBytes = 48 * 1024;

__device__ __forceinline__ int bytes_past_16(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) & 15);
}

// The rows [begin, end) of a CTA, cut into tiles of one size: a short last tile would leave the ring half
// empty. kUnaligned: rows whose numbers differ by a multiple of kClasses start alike past 16 bytes, and a
// CTA takes rows of one class, from their first 16-byte boundary on; the elements before it, `head`, are
// left to one warp.
template <RowSource kSource>
struct Rows {
  static constexpr int kStep = kSource == RowSource::kUnaligned ? kClasses : 1;
  static constexpr int kMost = kSource == RowSource::kSwiglu ? kTileRows / 2 : kTileRows;

  const __nv_bfloat16* weight;
  int64_t stride;  // elements
  int k;           // elements of a row from `weight` on
  int offset;      // elements before, of other CTAs of the cluster
  int head;        // elements before
  int first;       // row r is output first + r * kStep
  int begin, end;
  int per_tile;  // outputs; a swiglu tile has two rows for each

  // Of the CTA of that rank in a cluster of `cluster` CTAs.
  __device__ __forceinline__ Rows(const GemvParams& p, int cluster, int rank)
      : weight(p.weight), stride(p.row_stride), k(p.k), offset(0), head(0), first(0) {
    int n = p.n, part = blockIdx.x / cluster, parts = gridDim.x / cluster;
    if (cluster > 1) {
      const int most = ((k + kChunk - 1) / kChunk + cluster - 1) / cluster * kChunk;
      offset = min(k, rank * most);
      weight += offset;
      k = min(most, k - offset);
    }
    if (kStep > 1) {
      first = part % kStep;
      part /= kStep;
      parts = max(1, parts / kStep);
      n = (n - first + kStep - 1) / kStep;
      weight += first * stride;
      stride *= kStep;
      head = min(k, (16 - bytes_past_16(weight)) % 16 / 2);
      weight += head;
      k -= head;
    }
    begin = static_cast<int>(int64_t{n} * part / parts);
    end = static_cast<int>(int64_t{n} * (part + 1) / parts);
    const int tiles = max(1, (end - begin + kMost - 1) / kMost);
    per_tile = max(1, (end - begin + tiles - 1) / tiles);
  }
  __device__ __forceinline__ int output(int row) const { return first + row * kStep; }

  __device__ __forceinline__ int tiles_of_block(int row) const {
    return min(kBlockTiles, (end - row + per_tile - 1) / per_tile);
  }
};

// Where the windows of x after the first come through the ring. kUnaligned shifts x, which a copy cannot.
template <RowSource kSource, bool kResident>
constexpr bool kRingX = !kResident && kSource != RowSource::kUnaligned;

// Ring slots of a window of x: a slot holds two tokens'; an even number, since halves alternate.
__device__ __forceinline__ int x_slots(int m) { return m <= 4 ? 2 : 4; }

// Fills a warp's ring, kStages slots ahead of the MMAs and in their order: blocks, windows of x,
// tiles, chunks, halves of a chunk. A slot holds 16 rows x 128 bytes; piece i (16 bytes) of an odd row
// sits at i ^ 4, so that the 8 lanes of a quarter-warp read 8 different bank groups.
template <RowSource kSource, bool kResident>
struct Producer {
  static constexpr bool kUnaligned = kSource == RowSource::kUnaligned;
  static constexpr bool kSwiglu = kSource == RowSource::kSwiglu;
  static constexpr int kStep = kWarps * kChunk * 2;  // bytes from a warp's chunk to its next

  const GemvParams& p;
  const Rows<kSource>& all;
  const int lane, warp, chunks;  // chunks: of this warp
  const uint32_t ring;           // this lane's place in slot 0
  const uint64_t policy;
  int begin, window, tiles, tile, chunks_left, slot;
  int x_left;        // kRingX: slots of x before the tiles of this window
  const char* low;   // row lane / 8 of the tile, at this lane's piece of the chunk
  const char* high;  // row lane / 8 + 8; swiglu: row lane / 8 of gate
  int rows;          // of the tile, counted from row lane / 8 on
  int bytes;         // of a row, from the piece on
  int to_last;       // rows from row lane / 8 to the matrix's last

  __device__ __forceinline__ Producer(const GemvParams& p, const Rows<kSource>& all, int lane,
                                      int warp, int chunks, uint32_t warp_ring)
      : p(p),
        all(all),
        lane(lane),
        warp(warp),
        chunks(chunks),
        ring(warp_ring + lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16),
        policy(evict_first_policy()),
        begin(chunks > 0 ? all.begin : all.end),
        slot(0) {
    if (begin < all.end) enter_block();
    // The first window's x comes by loads: a ring filled before the dependency resolves has weights only.
    x_left = 0;
  }

  __device__ __forceinline__ void enter_block() {
    tiles = all.tiles_of_block(begin);
    window = 0;
    x_left = x_slots(p.m);
    enter_tile(0);
  }

  __device__ __forceinline__ void enter_tile(int next) {
    tile = next;
    chunks_left = kResident ? chunks : min(p.window, chunks - window);
    const int row = begin + tile * all.per_tile + lane / 8;
    const int offset = window * kStep + warp * kChunk * 2 + lane % 8 * 16;
    rows = min(all.per_tile - lane / 8, all.end - row);
    bytes = 2 * all.k - offset;
    if (kUnaligned) to_last = p.n - 1 - all.output(row);
    low = reinterpret_cast<const char*>(all.weight + row * all.stride) + offset;
    high = kSwiglu
               ? reinterpret_cast<const char*>(p.gate + row * p.gate_stride + all.offset) + offset
               : low + 16 * all.stride;
  }

  // Copies one piece of a row, as far as the row goes: `left` bytes from there on. Of the matrix's last
  // row only whole pieces: cp.async may read all 16 bytes whatever its size says, and past the matrix
  // they are not ours. (Below K = 8 a row before the last may reach past it too, within the 16 bytes
  // that torch's allocations are multiples of.)
  __device__ __forceinline__ void copy(uint32_t smem, const char* piece, bool valid, int left,
                                       bool last) const {
    if (kUnaligned && last && left < 16) left = 0;
    cp_async_16(smem, piece, valid ? min(max(left, 0), 16) : 0, policy);
  }

  // Two tokens' x of this window; that of an odd token lies as an odd row does.
  __device__ __forceinline__ void copy_x(uint32_t warp_ring) {
    const int pair = x_slots(p.m) - x_left--;
    const uint32_t smem = warp_ring + slot * kSlotBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = pair * 2 + i / 2;
      const int c = i % 2 * 2 + lane / 16;
      const int k = (warp + (window + c) * kWarps) * kChunk + lane % 16 * 8;
      if (token < p.m && c < chunks_left)
        cp_async_16(smem + i / 2 * 1024 + ((i % 2 * 32 + lane) ^ (i / 2 * 4)) * 16,
                    p.x + token * p.k + k, k < p.k ? 16 : 0);
    }
  }

  template <int kHalf>
  __device__ __forceinline__ void issue(uint32_t warp_ring) {
    if (kRingX<kSource, kResident> && x_left > 0 && begin < all.end) {
      copy_x(warp_ring);
    } else if (begin < all.end) {
      constexpr int kOffset = kHalf * kSlotK * 2;
      const uint32_t smem = ring + slot * kSlotBytes;
      const int left = bytes - kOffset;
      copy(smem, low + kOffset, rows > 0, left, to_last == 0);
      constexpr int kRow = Rows<kSource>::kStep;
      copy(smem + 512, low + 8 * all.stride + kOffset, rows > 4, left, to_last == 4 * kRow);
      copy(smem + 1024, high + kOffset, rows > (kSwiglu ? 0 : 8), left, to_last == 8 * kRow);
      copy(smem + 1536, high + 8 * (kSwiglu ? p.gate_stride : all.stride) + kOffset,
           rows > (kSwiglu ? 4 : 12), left, to_last == 12 * kRow);
      if (kHalf == 1) advance();
    }
    // Empty groups keep the count of pending groups equal to the distance from the MMAs.
    cp_async_commit();
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }

  __device__ __forceinline__ void advance() {
    if (--chunks_left > 0) {
      low += kStep;
      high += kStep;
      bytes -= kStep;
      return;
    }
    if (tile + 1 < tiles) return enter_tile(tile + 1);
    if (!kResident && window + p.window < chunks) {
      window += p.window;
      x_left = x_slots(p.m);
      return enter_tile(0);
    }
    begin += tiles * all.per_tile;
    if (begin < all.end) enter_block();
  }
};

// Brings to L2 what the ring will ask for next: the rows after the ones in it, one window wide.
template <RowSource kSource>
__device__ __forceinline__ void prefetch_rows(const GemvParams& p, const Rows<kSource>& all) {
  constexpr int kMatrices = kSource == RowSource::kSwiglu ? 2 : 1;
  const int width = min(all.k, p.window * kWarps * kChunk) * 2 & ~15;
  if (width == 0) return;
  const int first = all.begin + kWarps * kStages * kSlotBytes / (kMatrices * width);
  const int last = min(all.end, first + kPrefetchBytes / (kMatrices * width));
  for (int row = first + threadIdx.x; row < last; row += kThreads) {
    prefetch_l2(all.weight + row * all.stride, width);
    if (kSource == RowSource::kSwiglu)
      prefetch_l2(p.gate + row * p.gate_stride + all.offset, width);
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

// Token g's elements that face this lane's weights: one 16-byte piece per 32 k of a chunk. kUnaligned:
// from any boundary, word by word.
template <RowSource kSource>
__device__ __forceinline__ void load_x(const GemvParams& p, const Rows<kSource>& all, int lane,
                                       int chunk, uint4 (&x)[4]) {
  const int token = lane / 4;
  const int k = chunk * kChunk + lane % 4 * 8;
  const __nv_bfloat16* from = p.x + token * p.k + all.offset + all.head + k;
#pragma unroll
  for (int piece = 0; piece < 4; ++piece, from += 32) {
    x[piece] = make_uint4(0, 0, 0, 0);
    const int left = token < p.m ? all.k - k - piece * 32 : 0;
    if (kSource != RowSource::kUnaligned) {
      if (left > 0) x[piece] = __ldcg(reinterpret_cast<const uint4*>(from));
      continue;
    }
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

// Holds a warp until its window of x is there: something must use it, if only to sleep no time. Without it
// the compiler puts loads where x is used, between refills of the ring: K = 14,336 takes 4 % longer.
__device__ __forceinline__ void wait_for(const uint4 (&x)[kWindow][4]) {
  uint32_t any = 0;
#pragma unroll
  for (int c = 0; c < kWindow; ++c) any |= x[c][3].w;
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 1; @p nanosleep.u32 0; }" ::"r"(any) : "memory");
}

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

template <RowSource kSource, bool kResident, bool kSplit>
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
  extern __shared__ __align__(128) char smem[];
  float* sums = reinterpret_cast<float*>(smem + kWarps * kStages * kSlotBytes);

  pdl_launch_dependents();

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int rank = kSplit ? cluster_rank() : 0;
  const Rows<kSource> all(p, kSplit ? p.parts : 1, rank);
  const int chunks = ((all.k + kChunk - 1) / kChunk - warp + kWarps - 1) / kWarps;
  const uint32_t ring = smem_address(smem) + warp * kStages * kSlotBytes;
  // Row g's pieces t and t + 4 of a slot; odd rows hold them swapped.
  const uint32_t piece = ring + lane / 4 * 128 + (lane % 4 + lane / 4 % 2 * 4) * 16;

  // A cluster has one block. The CTA of rank r finishes its tiles r, r + parts, ...
  const uint32_t barrier = smem_address(smem) + kBarrierAt;
  if (kSplit && threadIdx.x == 0) {
    const int mine = (all.tiles_of_block(all.begin) - rank + p.parts - 1) / p.parts;
    init_inbox(barrier, p.parts * mine * ((p.m + 1) / 2) * 32 * int{sizeof(float)});
  }

  Producer<kSource, kResident> producer(p, all, lane, warp, chunks, ring);
  const auto fill_ring = [&] {
#pragma unroll
    for (int i = 0; i < kStages; ++i)
      i % 2 == 0 ? producer.template issue<0>(ring) : producer.template issue<1>(ring);
  };
  uint4 x[kWindow][4];
  const auto load_window = [&](int window) {
#pragma unroll
    for (int c = 0; c < kWindow; ++c)
      if ((kResident || c < p.window) && window + c < chunks)
        load_x(p, all, lane, warp + (window + c) * kWarps, x[c]);
    if (!kResident) wait_for(x);
  };
  int slot = 0;
  const auto take_window = [&] {
#pragma unroll 1
    for (int pair = 0; pair < x_slots(p.m); pair += 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        cp_async_wait<kStages - 1>();
        __syncwarp();
        if (lane / 8 == pair + half && lane / 4 < p.m) {
          const uint32_t from = ring + slot * kSlotBytes + lane / 4 % 2 * 1024;
#pragma unroll
          for (int c = 0; c < kWindow; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              x[c][i] =
                  ld_shared_16(from + ((c * 16 + i * 4 + lane % 4) ^ (lane / 4 % 2 * 4)) * 16);
        }
        __syncwarp();
        half == 0 ? producer.template issue<0>(ring) : producer.template issue<1>(ring);
        slot = slot + 1 == kStages ? 0 : slot + 1;
      }
    }
  };

  if (p.static_weights) {
    fill_ring();
    prefetch_rows<kSource>(p, all);
  }
  pdl_wait();
  load_window(0);
  if (!p.static_weights) fill_ring();
  // The last warp has the fewest chunks.
  const bool adds_head = kUnaligned && warp == kWarps - 1;
  uint32_t head_x = 0;
  if (adds_head && lane / 4 < p.m)
    head_x = load_pair<false>(p.x + lane / 4 * p.k + lane % 4 * 2, all.head - lane % 4 * 2);

  for (int block = all.begin; block < all.end; block += kBlockTiles * all.per_tile) {
    const int tiles = all.tiles_of_block(block);
    // One pass at least: a warp without chunks contributes zeros.
    for (int window = 0; window == 0 || window < chunks; window += p.window) {
      if (!kResident && (block > all.begin || window > 0)) {
        if (kRingX<kSource, kResident>) {
          if (window < chunks) take_window();
        } else {
          load_window(window);
        }
      }
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        // Two chains: a dependent MMA waits for the one before it.
        float acc[2][4] = {};
        uint32_t head[2] = {};
        if (adds_head && window == 0) {
          const int row = block + tile * all.per_tile + lane / 4;
          const __nv_bfloat16* from = all.weight + row * all.stride - all.head + lane % 4 * 2;
          const int left = all.head - lane % 4 * 2;
          head[0] = load_pair<false>(from, row < all.end ? left : 0);
          head[1] = load_pair<false>(from + 8 * all.stride, row + 8 < all.end ? left : 0);
        }
#pragma unroll
        for (int c = 0; c < kWindow; ++c) {
          if ((!kResident && c >= p.window) || window + c >= chunks) break;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            cp_async_wait<kStages - 1>();
            __syncwarp();
            const uint32_t at = slot * kSlotBytes;
            uint4 low[2] = {ld_shared_16(piece + at), ld_shared_16((piece ^ 64) + at)};
            uint4 high[2] = {ld_shared_16(piece + at + 1024),
                             ld_shared_16((piece ^ 64) + at + 1024)};
            // All lanes have read the slot that is refilled now.
            __syncwarp();
            half == 0 ? producer.template issue<0>(ring) : producer.template issue<1>(ring);
            slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint4& v = x[c][half * 2 + i];
              mma_m16n8k16_bf16(acc[0], low[i].x, high[i].x, low[i].y, high[i].y, v.x, v.y);
              mma_m16n8k16_bf16(acc[1], low[i].z, high[i].z, low[i].w, high[i].w, v.z, v.w);
            }
          }
        }
        if (adds_head) mma_m16n8k16_bf16(acc[0], head[0], head[1], 0, 0, head_x, 0);
        float4* sum = reinterpret_cast<float4*>(sums + (warp * kBlockTiles + tile) * kTileFloats) +
                      sum_slot(lane / 4, lane % 4);
        float4 total = make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1],
                                   acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
        if (!kResident && window > 0) {
          const float4 before = *sum;
          total.x += before.x;
          total.y += before.y;
          total.z += before.z;
          total.w += before.w;
        }
        *sum = total;
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
        if (tile < tiles) total[i] = sum_of_warps(tile, (warp + i * kWarps) % 4);
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
      const int row = block + tile * all.per_tile + in_tile;
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
