// SPDX-License-Identifier: Apache-2.0
// What the bodies of prefill attention share: which rows a warp owns, where they lie, and the copies of
// Q, K and V to shared memory.
#pragma once

#include <type_traits>

#include "astrai/device/async_copy.cuh"
#include "astrai/device/image_arch.cuh"
#include "attention/prefill_params.h"
#include "attention/tile_ops.cuh"

namespace astrai::attention {

template <int kHeadDim, bool kMasked>
struct PrefillShape {
  static constexpr PrefillTile kTile = prefill_tile(kImageArch, kHeadDim, kMasked);
  static constexpr int kWarpRows = kTile.warp_rows;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kRowTiles = kWarpRows / 16;  // MMA tiles of a warp: of rows,
  static constexpr int kKeyTiles = kBlockN / 8;     // of keys,
  static constexpr int kDimTiles = kHeadDim / 8;    // of head_dim
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kPieces = kHeadDim / 8;               // 16-byte pieces of a row
  static constexpr int kRowsAtOnce = 32 / kPieces;           // that a warp copies
  static constexpr int kCopyRows = kBlockN / kPrefillWarps;  // of a warp, of K or V
  static constexpr int kQBytes = kTile.block_m() * kRowBytes;
  static constexpr int kKvBytes = kBlockN * kRowBytes;  // of K or V; a stage is K, then V
  static_assert(kCopyRows % 8 == 0, "so that the rows of all warps have the same swizzle keys");
  static_assert(kCopyRows % kRowsAtOnce == 0 && kCopyRows <= 32 && kBlockN % 16 == 0);
};

// What a warp needs seldom, kept in shared memory while the registers are full.
struct WarpPlace {
  int64_t out, lse;           // where its first row's results go, in elements
  const int* pages;           // of its sequence
  const __nv_bfloat16* pool;  // K of its head in page 0
  const uint8_t* mask;        // of its first row
  int count;                  // rows that exist; 0 or less: none
};
static_assert(kPrefillWarps * sizeof(WarpPlace) == kPrefillPlaceBytes);

// Copies the rows of K and V that a warp brings of each step: kCopyRows that follow one another.
template <int kHeadDim, class Kv, bool kMasked>
struct KvLoader {
  using Shape = PrefillShape<kHeadDim, kMasked>;
  static constexpr bool kPaged = std::is_same_v<Kv, PagedKv>;
  static constexpr int kStep = Shape::kRowsAtOnce;

  const Kv& kv;
  const __nv_bfloat16* k;  // contiguous: this lane's piece of the first row that it copies
  const WarpPlace& warp_place;
  const int kv_len;
  const int lane_row;    // of the step: the first that this lane copies
  const int own_row;     // of the step: the one whose page this lane looks up
  const uint32_t place;  // in a tile, of this lane's piece of lane_row
  int64_t offset;        // paged: of own_row
  int page;              // of own_row in the step after `offset`'s

  __device__ __forceinline__ KvLoader(const Kv& kv, const WarpPlace& warp_place, int batch,
                                      int head, int kv_len, int warp, int lane)
      : kv(kv),
        warp_place(warp_place),
        kv_len(kv_len),
        lane_row(warp * Shape::kCopyRows + lane / Shape::kPieces),
        own_row(warp * Shape::kCopyRows + lane % Shape::kCopyRows),
        place(tile_offset<Shape::kRowBytes>(lane_row, lane % Shape::kPieces)) {
    if constexpr (kPaged) {
      page = look_up(own_row);
      locate(0);
    } else {
      k = kv.k + kv.base(batch, head) + kv.row(0, lane_row) + lane % Shape::kPieces * 8;
    }
  }

  // Whether all rows that the warp copies of a step are in one page.
  __device__ __forceinline__ bool in_one_page() const {
    if constexpr (kPaged) return 1 << kv.page_shift >= Shape::kCopyRows;
    return true;
  }

  __device__ __forceinline__ int look_up(int row) const {
    return row < kv_len ? __ldca(warp_place.pages + (row >> kv.page_shift)) : 0;
  }

  __device__ __forceinline__ void locate(int begin) {
    const int row = begin + own_row;
    offset = kv.row(page, row);
    page = look_up(row + Shape::kBlockN);
  }

  // From the step before to the one that begins at key `begin`.
  __device__ __forceinline__ void advance(int begin) {
    if constexpr (kPaged)
      locate(begin);
    else
      k += Shape::kBlockN * kv.token_stride;
  }

  // K of the step that begins at key `begin` into `smem` and V behind it, or one of them.
  template <bool kK, bool kV>
  __device__ __forceinline__ void copy(int begin, uint32_t smem) const {
    // V not by a pointer of its own, for which registers are too few.
    const int64_t to_v = reinterpret_cast<const char*>(kv.v) - reinterpret_cast<const char*>(kv.k);
    const __nv_bfloat16* base = k;
    if constexpr (kPaged) base = warp_place.pool + threadIdx.x % Shape::kPieces * 8;
    const auto copy_row = [&](int row, const __nv_bfloat16* from) {
      const bool valid = begin + lane_row + row < kv_len;
      const uint32_t to =
          smem + (place ^ (swizzle_key<Shape::kRowBytes>(row) << 4)) + row * Shape::kRowBytes;
      if constexpr (kK) cp_async_16_or_zero(to, from, valid);
      if constexpr (kV)
        cp_async_16_or_zero(to + Shape::kKvBytes, reinterpret_cast<const char*>(from) + to_v,
                            valid);
    };
    const int first = lane_row % Shape::kCopyRows;
    if (kPaged && !in_one_page()) {
#pragma unroll
      for (int row = 0; row < Shape::kCopyRows; row += kStep)
        copy_row(row, base + __shfl_sync(0xffffffffu, offset, first + row));
      return;
    }
    const __nv_bfloat16* from = base;
    if constexpr (kPaged) from += __shfl_sync(0xffffffffu, offset, first);
#pragma unroll
    for (int row = 0; row < Shape::kCopyRows; row += kStep, from += kStep * kv.token_stride)
      copy_row(row, from);
  }
};

// The rows of a warp: consecutive queries of one head.
struct WarpRows {
  int visible;  // keys that row 0 may see, as far as there are so many; row i may see i more
  int kv_len;

  __device__ __forceinline__ int limit(int row) const { return min(kv_len, visible + row); }
};

// What a warp is to do; the rest of it is in its WarpPlace.
struct WarpWork {
  int batch, head;
  int keys;  // that any row of the CTA may see
  WarpRows rows;
};

template <int kHeadDim, bool kMasked>
__device__ __forceinline__ WarpPlace* warp_places(unsigned char* smem) {
  using Shape = PrefillShape<kHeadDim, kMasked>;
  return reinterpret_cast<WarpPlace*>(smem + Shape::kQBytes + 2 * Shape::kStages * Shape::kKvBytes);
}

// Finds the warp's work and starts the copy of its rows of Q to `q_tile`. False where there is none for
// the CTA.
template <int kHeadDim, bool kMasked, class Schedule, class Kv>
__device__ __forceinline__ bool begin_warp(const PrefillParams<Schedule, Kv>& p, uint32_t q_tile,
                                           WarpPlace& place, int warp, int lane, WarpWork& work) {
  using Shape = PrefillShape<kHeadDim, kMasked>;
  QWork tile;
  if (!p.schedule.locate(blockIdx.x, tile)) return false;

  // Warps of a head take its rows in turn.
  const int per_head = kPrefillWarps >> p.heads_shift;
  const int head = (tile.group << p.heads_shift) + warp / per_head;
  const int kv_len = p.kv.kv_len(tile.batch);
  const int first = tile.row + warp % per_head * Shape::kWarpRows;  // query of the warp's row 0
  const int count = min(Shape::kWarpRows, tile.q_len - first);
  // The last row of the CTA sees most.
  const int past = min(tile.row + per_head * Shape::kWarpRows, tile.q_len);
  work.batch = tile.batch;
  work.head = head;
  work.keys = p.causal ? kv_len - tile.q_len + past : kv_len;
  work.rows.visible = p.causal ? kv_len - tile.q_len + first + 1 : kv_len;
  if (count <= 0) work.rows.visible = -Shape::kWarpRows;
  work.rows.kv_len = kv_len;
  if (lane == 0) {
    place.out = tile.batch * p.out_stride.batch + head * p.out_stride.head +
                (tile.start + first) * p.out_stride.row;
    place.lse = tile.batch * p.lse_batch + head * p.lse_head + tile.start + first;
    if constexpr (std::is_same_v<Kv, PagedKv>) {
      place.pages = p.kv.page_table + tile.batch * p.kv.table_stride;
      place.pool = p.kv.k + p.kv.base(tile.batch, head / p.group);
    }
    if constexpr (kMasked)
      place.mask = p.mask.data + tile.batch * p.mask.batch_stride + first * p.mask.row_stride;
    place.count = count;
  }
  __syncwarp();

  // Q's rows are read by the warp that copies them: no barrier.
  const int piece = lane % Shape::kPieces;
  const __nv_bfloat16* q = p.q + tile.batch * p.q_stride.batch + head * p.q_stride.head +
                           (tile.start + first) * p.q_stride.row + piece * 8;
#pragma unroll
  for (int i = 0; i < Shape::kWarpRows; i += Shape::kRowsAtOnce) {
    const int row = i + lane / Shape::kPieces;
    cp_async_16_or_zero(q_tile + tile_offset<Shape::kRowBytes>(row, piece),
                        q + row * p.q_stride.row, row < count);
  }
  return true;
}

}  // namespace astrai::attention
