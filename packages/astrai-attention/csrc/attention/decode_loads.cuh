// SPDX-License-Identifier: Apache-2.0
// What a CTA of decode reads: tiles of K and V into the rings of its warps, and its queries.
#pragma once

#include <type_traits>

#include "astrai/device/async_copy.cuh"
#include "astrai/device/image_arch.cuh"
#include "attention/decode_params.h"
#include "attention/tile_ops.cuh"

namespace astrai::attention {

// Fills a warp's ring with the tiles `first`, `first` + `step`, ...
template <int kHeadDim, class Kv>
struct TileLoader {
  static constexpr bool kPaged = std::is_same_v<Kv, PagedKv>;
  static constexpr int kStages = decode_stages(kImageArch, kHeadDim);
  static constexpr int kStageBytes = decode_stage_bytes(kHeadDim);
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kRows = 32 / kPieces;  // of a warp's copy
  static constexpr int kTile = decode_tile(kHeadDim);
  static constexpr int kCopies = kTile / kRows;
  static constexpr int kBlock = 16;
  static constexpr int kBlocks = kTile / kBlock;
  static constexpr int kAhead = 8;
  static_assert(kAhead * kBlocks <= 32, "an id in each lane");

  const DecodeParams<Kv>& p;
  const int batch, head, step, lane;
  const uint32_t ring;  // this lane's place in slot 0
  const uint64_t policy;
  int64_t base;    // of this lane's piece in a row of the sequence and head
  const int* ids;  // of the sequence's pages
  int length;      // max_length until the sequence's is known
  int tile, slot;
  // Page ids, and those to use after them: an id takes longer to come than a tile. A lane has that of token
  // lane % kTile of the next tile; `by_lanes` that of a block of one of the next kAhead tiles, `turn` of which
  // are issued.
  int page, later_page, turn;

  __device__ __forceinline__ TileLoader(const DecodeParams<Kv>& p, int batch, int head, int first,
                                        int step, int lane, uint32_t warp_ring)
      : p(p),
        batch(batch),
        head(head),
        step(step),
        lane(lane),
        ring(warp_ring + tile_offset<kRowBytes>(lane / kPieces, lane % kPieces)),
        policy(evict_first_policy()),
        length(p.max_length),
        tile(first),
        slot(0),
        turn(0) {
    // Computed here, before the wait, and not where they are used.
    base = p.kv.base(batch, head) + lane % kPieces * 8;
    if (in_blocks()) base += lane / kPieces * p.kv.token_stride;
    asm volatile("" : "+l"(base));
    if constexpr (kPaged) {
      ids = p.kv.page_table + batch * p.kv.table_stride;
      asm volatile("" : "+l"(ids));
    }
  }

  // Blocks of 16 tokens lie in one page then: their rows are a stride apart.
  __device__ __forceinline__ bool in_blocks() const {
    if constexpr (kPaged) return 1 << p.kv.page_shift >= kBlock;
    return true;
  }
  __device__ __forceinline__ int position_of(int tile) const { return tile * kTile + lane % kTile; }
  // With a static cache the first ids come before the wait, and those of two tiles sooner than of eight.
  __device__ __forceinline__ bool by_lanes() const {
    return kPaged && in_blocks() && !p.static_cache;
  }

  // This lane's id, of those for `tile` and on.
  __device__ __forceinline__ int page_of(int tile) const {
    if constexpr (kPaged) {
      // At most 2^30 and 41 steps: no overflow. Unsigned saves the extension of the sign.
      uint32_t position = position_of(tile);
      bool is_one = true;
      if (by_lanes()) {
        position = (tile + lane / kBlocks * step) * kTile + lane % kBlocks * kBlock;
        is_one = lane < kAhead * kBlocks;
      }
      if (is_one && position < static_cast<uint32_t>(length))
        return __ldca(ids + (position >> p.kv.page_shift));
    }
    return 0;
  }

  // Tiles from the first one of `page` to that of `later_page`.
  __device__ __forceinline__ int stride_of_pages() const {
    return (by_lanes() ? kAhead : 1) * step;
  }

  // Before the length is known: what lies past it is not used.
  __device__ __forceinline__ void load_pages() {
    page = page_of(tile);
    later_page = page_of(tile + stride_of_pages());
  }

  // Whether the next tile has a token that comes from `fresh`.
  __device__ __forceinline__ bool has_fresh() const {
    const int left = length - tile * kTile;
    return kPaged && p.fresh.k != nullptr && left > 0 && left <= kTile;
  }

  // Copies the next tile's rows: `row_of(i)` is the offset of row i * kRows + lane / kPieces.
  template <class RowOf>
  __device__ __forceinline__ void copy(int left, const RowOf& row_of) const {
    const int piece = lane % kPieces * 8;
    const bool fresh = has_fresh();
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int token = i * kRows + lane / kPieces;
      const int64_t from = row_of(i);
      const __nv_bfloat16* k = p.kv.k + from;
      const __nv_bfloat16* v = p.kv.v + from;
      if (fresh && token == left - 1) {
        k = p.fresh.k + batch * p.fresh.k_stride.batch + head * p.fresh.k_stride.head + piece;
        v = p.fresh.v + batch * p.fresh.v_stride.batch + head * p.fresh.v_stride.head + piece;
      }
      const int bytes = token < left ? 16 : 0;
      // Keys of rows i * kRows and lane / kPieces have no bit in common.
      const uint32_t key = swizzle_key<kRowBytes>(i * kRows);
      const uint32_t at = ((ring + slot * kStageBytes) ^ (key << 4)) + i * kRows * kRowBytes;
      cp_async_16(at, k, bytes, policy);
      cp_async_16(at + kStageBytes / 2, v, bytes, policy);
    }
  }

  __device__ __forceinline__ void issue() {
    const int left = length - tile * kTile;
    if (left > 0) {
      const int64_t stride = p.kv.token_stride;
      if (in_blocks()) {
        int64_t rows[kBlocks];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const int from = by_lanes() ? turn * kBlocks + block : block * kBlock;
          const int id = kPaged ? __shfl_sync(0xffffffffu, page, from) : 0;
          rows[block] = base + p.kv.row(id, tile * kTile + block * kBlock);
        }
        copy(left, [&](int i) { return rows[i * kRows / kBlock] + i * kRows % kBlock * stride; });
      } else {
        const int64_t row = p.kv.row(page, position_of(tile));
        copy(left, [&](int i) {
          return base + __shfl_sync(0xffffffffu, row, i * kRows + lane / kPieces);
        });
      }
      tile += step;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      if (!by_lanes() || ++turn == kAhead) {
        turn = 0;
        page = later_page;
        later_page = page_of(tile + stride_of_pages());
      }
    }
    // Empty groups keep the count of pending groups equal to the distance from the MMAs.
    cp_async_commit();
  }
};

// The queries of a CTA, on their way to shared memory in pieces of 16 bytes. All CTAs of a unit want them at once,
// from a few lines of L2, which serve one request after the other: read by each warp as the MMA's fragments
// have them, 4 bytes a lane, they came a microsecond or two later.
template <int kHeadDim, int kThreads>
struct QueryPieces {
  static constexpr int kRow = kHeadDim / 8;
  static constexpr int kPieces = kDecodeHeads * kRow;
  static constexpr int kEach = (kPieces + kThreads - 1) / kThreads;

  const uint4* from[kEach];  // null without such a query head
  uint4 pieces[kEach];

  template <class Kv>
  __device__ __forceinline__ QueryPieces(const DecodeParams<Kv>& p, int batch, int first_head,
                                         int heads) {
    const __nv_bfloat16* const rows = p.q + batch * p.q_stride.batch + first_head * p.q_stride.head;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = threadIdx.x + j * kThreads;
      from[j] = i / kRow < heads
                    ? reinterpret_cast<const uint4*>(rows + i / kRow * p.q_stride.head) + i % kRow
                    : nullptr;
      asm volatile("" : "+l"(from[j]));
    }
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      pieces[j] = make_uint4(0, 0, 0, 0);
      if (from[j] != nullptr) pieces[j] = __ldcg(from[j]);
    }
    // Or the compiler moves the loads behind the copies.
    __syncwarp();
  }

  template <class Warp>
  __device__ __forceinline__ void put(char* smem) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = threadIdx.x + j * kThreads;
      if (i < kPieces) Warp::put_q(smem, i / kRow, i % kRow, pieces[j]);
    }
  }
};

}  // namespace astrai::attention
