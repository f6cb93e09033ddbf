// SPDX-License-Identifier: Apache-2.0
// Which rows a CTA of the small-M linear kernel has, and how they come to its warps' rings.
#pragma once

#include "astrai/device/async_copy.cuh"
#include "astrai/device/image_arch.cuh"
#include "gemv/gemv_params.h"
#include "gemv/gemv_traits.h"

namespace astrai::gemv {

constexpr int kStages = stages_for(kImageArch);

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
    const int each = n / parts;
    const int more = n - each * parts;  // CTAs with one more
    begin = part * each + min(part, more);
    end = begin + each + (part < more);
    const int tiles = max(1, (end - begin + kMost - 1) / kMost);
    per_tile = max(1, (end - begin + tiles - 1) / tiles);
    // Tells the compiler that they are the same for a warp.
    begin = __shfl_sync(0xffffffffu, begin, 0);
    end = __shfl_sync(0xffffffffu, end, 0);
    per_tile = __shfl_sync(0xffffffffu, per_tile, 0);
  }
  __device__ __forceinline__ int output(int row) const { return first + row * kStep; }

  __device__ __forceinline__ int tiles_of_block(int row) const {
    int tiles = 1;  // a division takes longer
#pragma unroll
    for (int i = 1; i < kBlockTiles; ++i) tiles += row + i * per_tile < end;
    return tiles;
  }
};

// Where x after the first load comes through the ring. kUnaligned shifts x, which a copy cannot.
template <RowSource kSource, bool kResident>
constexpr bool kRingX = !kResident && kSource != RowSource::kUnaligned;

// Ring slots of a window of x: a slot holds two tokens'. An even number, since halves alternate.
template <int kSegments>
constexpr int kXSlots = kMaxTokens / kSegments / 2;

// x takes 64 of a thread's 128 registers. Where a kernel spills one more, a call takes 0.5 us longer.
template <int kSegments, int kHeld>
constexpr bool kFewRegisters = kCtasPerSm == 2 && (kSegments == 1 || kHeld == 2);

// Fills a warp's ring, kStages slots ahead of the MMAs and in their order: blocks, as many windows of x as
// registers hold, tiles, chunks, halves of a chunk. A slot holds 16 rows x 128 bytes; piece i (16 bytes) of an
// odd row sits at i ^ 4, so that the 8 lanes of a quarter-warp read 8 different bank groups.
template <RowSource kSource, bool kResident, int kSegments, int kHeld>
struct Producer {
  static constexpr bool kUnaligned = kSource == RowSource::kUnaligned;
  static constexpr bool kSwiglu = kSource == RowSource::kSwiglu;
  static constexpr int kStep = kWarps * kChunk * 2;  // bytes from a warp's chunk to its next
  static constexpr int kPointers = kFewRegisters<kSegments, kHeld> ? 2 : 4;

  const GemvParams& p;
  const Rows<kSource>& all;
  const int lane, warp, chunks;  // chunks: of this warp
  const uint32_t ring;           // the warp's
  const uint32_t place;          // this lane's in a slot
  const uint64_t policy;
  int row;          // the tile's first
  int chunks_left;  // of the tile
  int block;        // not kResident: its first row
  int window;       // not kResident: the first chunk of those that registers hold
  // kRingX: slots of x before the tiles of these windows. None at first: a ring filled before the dependency
  // resolves has weights only.
  int x_left;
  // Rows lane / 8, + 4, + 8 and + 12 of the tile (swiglu: the last two are of gate), at this lane's piece of
  // the chunk; with kFewRegisters only the first and the third.
  const char* from[kPointers];
  int rows;     // of the tile, counted from row lane / 8 on
  int bytes;    // of a row, from the piece on
  int to_last;  // kUnaligned: rows from row lane / 8 to the matrix's last

  __device__ __forceinline__ Producer(const GemvParams& p, const Rows<kSource>& all, int lane,
                                      int warp, int chunks, uint32_t warp_ring)
      : p(p),
        all(all),
        lane(lane),
        warp(warp),
        chunks(chunks),
        ring(warp_ring),
        place(lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16),
        policy(evict_first_policy()),
        row(chunks > 0 ? all.begin : all.end),
        block(row),
        window(0),
        x_left(0),
        to_last(0) {
    if (row < all.end) enter_tile();
  }

  __device__ __forceinline__ void enter_tile() {
    chunks_left = kResident ? chunks : min(kHeld * p.window, chunks - window);
    const int mine = row + lane / 8;
    const int offset = (kResident ? 0 : window * kStep) + warp * kChunk * 2 + lane % 8 * 16;
    rows = min(all.per_tile - lane / 8, all.end - mine);
    bytes = 2 * all.k - offset;
    if (kUnaligned) to_last = p.n - 1 - all.output(mine);
    const char* low = reinterpret_cast<const char*>(all.weight + mine * all.stride) + offset;
    const char* high =
        kSwiglu ? reinterpret_cast<const char*>(p.gate + mine * p.gate_stride + all.offset) + offset
                : low + 16 * all.stride;
    from[0] = low;
    from[kPointers / 2] = high;
    if constexpr (kPointers == 4) {
      from[1] = low + 8 * all.stride;
      from[3] = high + 8 * (kSwiglu ? p.gate_stride : all.stride);
    }
  }

  // Copies one piece of a row, as far as the row goes: `left` bytes from there on. Of the matrix's last
  // row only whole pieces: cp.async may read all 16 bytes whatever its size says, and past the matrix
  // they are not ours. (Below K = 8 a row before the last may reach past it too, within the 16 bytes
  // that torch's allocations are multiples of.)
  __device__ __forceinline__ void copy(uint32_t smem, const char* piece, bool valid, int left,
                                       bool last) const {
    if (kUnaligned) {
      if (last && left < 16) left = 0;
      cp_async_16(smem, piece, valid ? min(max(left, 0), 16) : 0, policy);
    } else {
      // All or nothing is a predicate; a size takes eight instructions.
      cp_async_16(smem, piece, valid && left > 0 ? 16 : 0, policy);
    }
  }

  // Two tokens' x of this window; that of an odd token lies as an odd row does.
  __device__ __forceinline__ void copy_x(uint32_t smem) {
    const int pair = kXSlots<kSegments> - x_left--;
    const int k = (warp + (window + lane / 16) * kWarps) * kChunk + lane % 16 * 8;
    const __nv_bfloat16* x = p.x + pair * 2 * p.k + k;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = i % 2 * 2;
      const bool valid =
          pair * 2 + i / 2 < p.m && lane / 16 + c < chunks_left && k + c * kWarps * kChunk < p.k;
      cp_async_16(smem + i / 2 * 1024 + ((i % 2 * 32 + lane) ^ (i / 2 * 4)) * 16,
                  x + i / 2 * p.k + c * kWarps * kChunk, valid ? 16 : 0);
    }
  }

  // Into the slot `at` bytes into the ring.
  template <int kHalf>
  __device__ __forceinline__ void issue(int at) {
    if (kRingX<kSource, kResident> && x_left > 0 && row < all.end) {
      copy_x(ring + at);
    } else if (row < all.end) {
      constexpr int kOffset = kHalf * kSlotK * 2;
      // Not a sum, which nvcc 13.0 puts into the copy as [register + uniform register]: with an L2 policy
      // its encoding of that is wrong ("illegal instruction").
      static_assert(kSlotBytes % 512 == 0, "no bit of a place");
      const uint32_t smem = (ring + at) | place;
      const int left = bytes - kOffset;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* piece = from[i * kPointers / 4] + kOffset;
        if (kPointers == 2 && i % 2 == 1)
          piece += 8 * (kSwiglu && i == 3 ? p.gate_stride : all.stride);
        copy(smem + i * 512, piece, rows > (kSwiglu ? i % 2 : i) * 4, left,
             to_last == i * 4 * Rows<kSource>::kStep);
      }
      if (kHalf == 1) advance();
    }
    // Empty groups keep the count of pending groups equal to the distance from the MMAs.
    cp_async_commit();
  }

  __device__ __forceinline__ void advance() {
    if (--chunks_left > 0) {
#pragma unroll
      for (const char*& piece : from) piece += kStep;
      bytes -= kStep;
      return;
    }
    row += all.per_tile;
    if (!kResident && row >= min(all.end, block + kBlockTiles * all.per_tile)) {
      x_left = kXSlots<kSegments>;
      window += kHeld * p.window;
      if (window < chunks) {
        row = block;
      } else {
        window = 0;
        block = row;
      }
    }
    if (row < all.end) enter_tile();
  }
};

// Brings to L2 what the ring will ask for next: the rows after the ones in it, as wide as registers hold x.
template <RowSource kSource, int kHeld>
__device__ __forceinline__ void prefetch_rows(const GemvParams& p, const Rows<kSource>& all) {
  constexpr int kMatrices = kSource == RowSource::kSwiglu ? 2 : 1;
  const int width = min(all.k, kHeld * p.window * kWarps * kChunk) * 2 & ~15;
  if (width == 0) return;
  const int first = all.begin + kWarps * kStages * kSlotBytes / (kMatrices * width);
  const int last = min(all.end, first + kPrefetchBytes / (kMatrices * width));
  for (int row = first + threadIdx.x; row < last; row += kThreads) {
    prefetch_l2(all.weight + row * all.stride, width);
    if (kSource == RowSource::kSwiglu)
      prefetch_l2(p.gate + row * p.gate_stride + all.offset, width);
  }
}

}  // namespace astrai::gemv
