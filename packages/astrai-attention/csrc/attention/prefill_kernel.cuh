// SPDX-License-Identifier: Apache-2.0
// Prefill attention, bf16 in, fp32 accumulate: out = softmax(scale * q k^T, where allowed) v, with
// grouped heads, causal or boolean masks, K and V contiguous or paged.
//
// Algorithm. FlashAttention-2 (Dao, 2023) on mma.m16n8k16. A CTA of 4 warps owns 128 rows (64 at
// head_dim 256) and walks the keys in steps of block_n; a warp owns 32 (16) rows with their scores,
// output and softmax state in registers. 32 rows a warp, because each fragment of K and V that comes
// from shared memory then serves two MMAs: with 16, 256 bytes an MMA, the 128 bytes a clock of shared
// memory stop tensor cores at half their rate. Scores become probabilities, and A fragments, in place.
// Exponentials are base 2, the scale folded into their one FFMA. A row's reference maximum moves only
// when a step exceeds it by more than 2^8: after the first steps hardly ever, so the output is
// hardly ever rescaled; the sums stay far inside fp32, and bf16 has its relative precision anywhere.
//
// Rows. A row is a query of one head: a CTA takes 1, 2 or 4 heads of a KV head, each warp rows of one
// head. With 4, a causal tile ends 32 keys past the first query's diagonal instead of 128.
//
// Grid. One-dimensional, see the schedules in prefill_params.h. Steps above the diagonal are not
// visited; only those that the diagonal or the last key crosses pay for comparing positions.
//
// Shared memory. Q's tile (later the output's, for whole-row stores), then `stages` pairs of K and V,
// all swizzled (tile_ops.cuh), filled by cp.async. Two stages: the next pair is under way during a whole
// step, one barrier a step. One stage: V is under way during q k^T, the next K during p v. What lies
// past a length is filled with zeros, never read. head_dim 128: 32 + 2 * 32 KB on sm_90; 256: 32 + 64.
//
// Pages. A lane looks up the page of one row of the step after next, so that the look-up is never
// waited for, and the warp's lanes take the rows' offsets from each other by shuffles: the cost of a row
// is two shuffles and an addition, whatever the page size.
//
// Floor. 4 * rows * keys * head_dim operations a head; mma.sync gives about 60 % of the peak of sm_90.
// 2 CTAs on an SM share it: one's softmax covers the other's MMAs.
#pragma once

#include <type_traits>

#include "astrai/device/async_copy.cuh"
#include "astrai/device/mma.cuh"
#include "astrai/device/pdl.cuh"
#include "attention/prefill_params.h"
#include "attention/tile_ops.cuh"

namespace astrai::attention {

#if defined(__CUDA_ARCH__)
constexpr int kPrefillArch = __CUDA_ARCH__ / 10;
#else
constexpr int kPrefillArch = 80;
#endif

// How far, in powers of 2, a score may exceed its row's reference before the reference moves.
constexpr float kPrefillSlack = 8.0f;

template <int kHeadDim>
struct PrefillShape {
  static constexpr PrefillTile kTile = prefill_tile(kPrefillArch, kHeadDim);
  static constexpr int kWarpRows = kTile.warp_rows;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kRowTiles = kWarpRows / 16;  // MMA tiles of a warp: of rows,
  static constexpr int kKeyTiles = kBlockN / 8;     // of keys,
  static constexpr int kDimTiles = kHeadDim / 8;    // of head_dim
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kPieces = kHeadDim / 8;           // 16-byte pieces of a row
  static constexpr int kRowsAtOnce = 32 / kPieces;       // that a warp copies
  static constexpr int kCopyRows = kBlockN / kPrefillWarps;  // of a warp, of K or V
  static constexpr int kQBytes = kTile.block_m() * kRowBytes;
  static constexpr int kKvBytes = kBlockN * kRowBytes;  // of K or V; a stage is K, then V
  static_assert(kCopyRows % 8 == 0, "so that the rows of all warps have the same swizzle keys");
  static_assert(kCopyRows % kRowsAtOnce == 0 && kCopyRows <= 32 && kBlockN % 16 == 0);
};

// Copies the rows of K and V that a warp brings of each step: kCopyRows that follow one another.
template <int kHeadDim, class Kv>
struct KvLoader {
  using Shape = PrefillShape<kHeadDim>;
  static constexpr bool kPaged = std::is_same_v<Kv, PagedKv>;

  const Kv& kv;
  const __nv_bfloat16* k;  // of the sequence where contiguous, and the head; this lane's piece
  const __nv_bfloat16* v;
  const int* pages;
  const int kv_len;
  const int lane_row;  // of the step: the first that this lane copies
  const int own_row;   // of the step: the one whose page this lane looks up
  const uint32_t place;
  int64_t offset;  // contiguous: of lane_row; paged: of own_row
  int page;        // of own_row in the step after `offset`'s
  int position;    // of lane_row

  __device__ __forceinline__ KvLoader(const Kv& kv, int batch, int head, int kv_len, int warp,
                                      int lane)
      : kv(kv),
        kv_len(kv_len),
        lane_row(warp * Shape::kCopyRows + lane / Shape::kPieces),
        own_row(warp * Shape::kCopyRows + lane % Shape::kCopyRows),
        place(tile_offset<Shape::kRowBytes>(lane_row, lane % Shape::kPieces)) {
    const int64_t first = head * kv.head_stride + lane % Shape::kPieces * 8;
    k = kv.k + first;
    v = kv.v + first;
    if constexpr (kPaged) {
      pages = kv.page_table + batch * kv.table_stride;
      page = look_up(own_row);
    } else {
      k += batch * kv.batch_stride;
      v += batch * kv.batch_stride;
    }
  }

  __device__ __forceinline__ int look_up(int row) const {
    if constexpr (kPaged) return row < kv_len ? pages[row >> kv.page_shift] : 0;
    return 0;
  }

  // Turns to the step that begins at key `begin`; steps follow one another.
  __device__ __forceinline__ void aim(int begin) {
    position = begin + lane_row;
    if constexpr (kPaged) {
      const int row = begin + own_row;
      offset = page * kv.page_stride + (row & ((1 << kv.page_shift) - 1)) * kv.token_stride;
      page = look_up(row + Shape::kBlockN);
    } else {
      offset = position * kv.token_stride;
    }
  }

  // K into `smem` and V behind it, or one of them.
  template <bool kK, bool kV>
  __device__ __forceinline__ void copy(uint32_t smem) const {
    constexpr int kStep = Shape::kRowsAtOnce;
#pragma unroll
    for (int row = 0; row < Shape::kCopyRows; row += kStep) {
      int64_t at = offset + row * kv.token_stride;
      if constexpr (kPaged) at = __shfl_sync(0xffffffffu, offset, lane_row % Shape::kCopyRows + row);
      const bool valid = position + row < kv_len;
      const uint32_t to =
          smem + (place ^ (swizzle_key<Shape::kRowBytes>(row) << 4)) + row * Shape::kRowBytes;
      if constexpr (kK) cp_async_16_or_zero(to, k + at, valid);
      if constexpr (kV) cp_async_16_or_zero(to + Shape::kKvBytes, v + at, valid);
    }
  }
};

// What of the keys a warp's rows may see.
struct WarpRows {
  int first;   // query of row 0
  int q_len;   // of the sequence
  int kv_len;
  int before;  // query i sees before + i + 1 keys, and at most kv_len

  __device__ __forceinline__ int limit(int row) const { return min(kv_len, before + first + row + 1); }
};

// The state of a softmax, for rows lane / 4 and lane / 4 + 8 of each MMA tile. `reference` is at most
// kPrefillSlack above or below the scores' maximum, -inf before the first key; `sum` is the lane's part.
template <int kHeadDim>
struct WarpState {
  using Shape = PrefillShape<kHeadDim>;
  float out[Shape::kRowTiles][Shape::kDimTiles][4];
  float score[Shape::kRowTiles][Shape::kKeyTiles][4];
  float reference[Shape::kRowTiles][2];
  float sum[Shape::kRowTiles][2];
  uint32_t q[Shape::kTile.q_in_registers ? kHeadDim / 16 : 1][Shape::kRowTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::kDimTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -INFINITY;
        sum[m][half] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void load_q(int slot, int dims, uint32_t q_lane) {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
      ldmatrix_x4(q[slot][m], pieces_on(q_lane, 2 * dims) + m * 16 * Shape::kRowBytes);
  }

  // score = q k^T; k_lane: this lane's row of K's first tile of 16 keys.
  __device__ __forceinline__ void multiply_k(uint32_t q_lane, uint32_t k_lane) {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < Shape::kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) score[m][n][i] = 0.0f;
#pragma unroll
    for (int dims = 0; dims < kHeadDim / 16; ++dims) {
      const int slot = Shape::kTile.q_in_registers ? dims : 0;
      if constexpr (!Shape::kTile.q_in_registers) load_q(0, dims, q_lane);
#pragma unroll
      for (int n = 0; n < Shape::kKeyTiles; n += 2) {
        uint32_t k[4];
        ldmatrix_x4(k, pieces_on(k_lane, 2 * dims) + n * 8 * Shape::kRowBytes);
#pragma unroll
        for (int m = 0; m < Shape::kRowTiles; ++m) {
          const uint32_t(&a)[4] = q[slot][m];
          mma_m16n8k16_bf16(score[m][n], a[0], a[1], a[2], a[3], k[0], k[1]);
          mma_m16n8k16_bf16(score[m][n + 1], a[0], a[1], a[2], a[3], k[2], k[3]);
        }
      }
    }
  }

  // Scores of keys that a row may not see become -inf.
  template <bool kMasked>
  __device__ __forceinline__ void apply_mask(const WarpRows& rows, const KeyMask& mask, int batch,
                                             int begin, int lane) {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + lane / 4;
        // Rows past the last query are not stored: nothing is read for them.
        const int limit = rows.first + row < rows.q_len ? rows.limit(row) : 0;
        const uint8_t* keep = mask.data + batch * mask.batch_stride +
                              (rows.first + row) * mask.row_stride;
#pragma unroll
        for (int n = 0; n < Shape::kKeyTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = begin + n * 8 + lane % 4 * 2 + i;
            bool seen = key < limit;
            if constexpr (kMasked) seen = seen && keep[key * mask.key_stride] != 0;
            if (!seen) score[m][n][2 * half + i] = -INFINITY;
          }
      }
  }

  // Moves the references, and what was summed relative to them, where scores have outgrown them.
  __device__ __forceinline__ void raise_references(float scale_log2) {
    const float slack = kPrefillSlack / scale_log2;
    float top[Shape::kRowTiles][2];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = fmaxf(score[m][0][2 * half], score[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < Shape::kKeyTiles; ++n)
          most = fmaxf(most, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        top[m][half] = most;
        outgrown = outgrown || most > reference[m][half] + slack;
      }
    if (!__any_sync(0xffffffffu, outgrown)) return;
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = reference[m][half];
        const float now = fmaxf(old, top[m][half]);
        const float ratio = old == now ? 1.0f : exp2_fast((old - now) * scale_log2);
        reference[m][half] = now;
        sum[m][half] *= ratio;
#pragma unroll
        for (int n = 0; n < Shape::kDimTiles; ++n) {
          out[m][n][2 * half] *= ratio;
          out[m][n][2 * half + 1] *= ratio;
        }
      }
  }

  // out += p v, p = 2^(scale * score - reference); v_lane: this lane's row of V's first tile.
  __device__ __forceinline__ void multiply_v(uint32_t v_lane, float scale_log2) {
    float shift[Shape::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float least = reference[m][half];
        shift[m][half] = least == -INFINITY ? 0.0f : -least * scale_log2;
      }
#pragma unroll
    for (int n = 0; n < Shape::kKeyTiles; n += 2) {
      uint32_t p[Shape::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const float* s = &score[m][n + pair / 2][pair % 2 * 2];
          const float first = exp2_fast(fmaf(s[0], scale_log2, shift[m][pair % 2]));
          const float second = exp2_fast(fmaf(s[1], scale_log2, shift[m][pair % 2]));
          sum[m][pair % 2] += first + second;
          p[m][pair] = pack_bf16(first, second);
        }
#pragma unroll
      for (int d = 0; d < Shape::kDimTiles; d += 2) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, pieces_on(v_lane, d) + n * 8 * Shape::kRowBytes);
#pragma unroll
        for (int m = 0; m < Shape::kRowTiles; ++m) {
          mma_m16n8k16_bf16(out[m][d], p[m][0], p[m][1], p[m][2], p[m][3], v[0], v[1]);
          mma_m16n8k16_bf16(out[m][d + 1], p[m][0], p[m][1], p[m][2], p[m][3], v[2], v[3]);
        }
      }
    }
  }

  // Divides by the sums, and turns references into logarithms of sums. Rows that saw no key: 0, -inf.
  __device__ __forceinline__ void finish(float scale_log2) {
    constexpr float kLn2 = 0.693147180559945309f;
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const bool none = total == 0.0f;  // a NaN is some
        const float inverse = none ? 0.0f : 1.0f / total;
        reference[m][half] =
            none ? -INFINITY : (reference[m][half] * scale_log2 + log2f(total)) * kLn2;
#pragma unroll
        for (int n = 0; n < Shape::kDimTiles; ++n) {
          out[m][n][2 * half] *= inverse;
          out[m][n][2 * half + 1] *= inverse;
        }
      }
  }
};

template <int kHeadDim, class Schedule, class Kv, bool kMasked>
__global__ void __launch_bounds__(kPrefillThreads, kPrefillCtasPerSm)
    prefill_kernel(const __grid_constant__ PrefillParams<Schedule, Kv> p) {
  using Shape = PrefillShape<kHeadDim>;
  constexpr int kRowBytes = Shape::kRowBytes;
  extern __shared__ __align__(1024) unsigned char prefill_smem[];

  pdl_launch_dependents();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t q_tile = smem_address(prefill_smem) + warp * Shape::kWarpRows * kRowBytes;
  const uint32_t kv_tiles = smem_address(prefill_smem) + Shape::kQBytes;

  pdl_wait();
  QWork work;
  if (!p.schedule.locate(blockIdx.x, work)) return;

  // Warps of a head take its rows in turn.
  const int per_head = kPrefillWarps >> p.heads_shift;
  const int head = (work.group << p.heads_shift) + warp / per_head;
  const int kv_len = p.kv.kv_len(work.batch);
  WarpRows rows;
  rows.first = work.row + warp % per_head * Shape::kWarpRows;
  rows.q_len = work.q_len;
  rows.kv_len = kv_len;
  rows.before = p.causal ? kv_len - work.q_len : kv_len;
  // Keys that any row of the CTA may see; all rows of the warp; any row of the warp.
  const int last_row = min(work.row + per_head * Shape::kWarpRows, work.q_len) - 1;
  const int keys = min(kv_len, rows.before + last_row + 1);
  const int seen_by_all = rows.limit(0);
  const int rows_left = min(Shape::kWarpRows, work.q_len - rows.first);
  const int seen_by_any = rows_left > 0 ? rows.limit(rows_left - 1) : 0;

  // Q's rows are read by the warp that copies them: no barrier.
  {
    const int piece = lane % Shape::kPieces;
    const __nv_bfloat16* q = p.q + work.batch * p.q_stride.batch + head * p.q_stride.head +
                             (work.start + rows.first) * p.q_stride.row + piece * 8;
#pragma unroll
    for (int i = 0; i < Shape::kWarpRows; i += Shape::kRowsAtOnce) {
      const int row = i + lane / Shape::kPieces;
      cp_async_16_or_zero(q_tile + tile_offset<kRowBytes>(row, piece), q + row * p.q_stride.row,
                          row < rows_left);
    }
  }
  KvLoader<kHeadDim, Kv> loader(p.kv, work.batch, head / p.group, kv_len, warp, lane);
  loader.aim(0);
  if (keys > 0) loader.template copy<true, (Shape::kStages > 1)>(kv_tiles);
  cp_async_commit();

  const uint32_t q_lane = q_tile + tile_offset<kRowBytes>(lane % 16, lane / 16);
  const uint32_t k_lane =
      kv_tiles + tile_offset<kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const uint32_t v_lane =
      kv_tiles + Shape::kKvBytes + tile_offset<kRowBytes>(lane % 16, lane / 16);
  WarpState<kHeadDim> state;
  state.clear();
  if constexpr (Shape::kTile.q_in_registers) {
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int dims = 0; dims < kHeadDim / 16; ++dims) state.load_q(dims, dims, q_lane);
  }

  uint32_t stage = 0;
  for (int begin = 0; begin < keys; begin += Shape::kBlockN) {
    // Everything under way is of this step. Past the barrier all have it, and are done with the last.
    cp_async_wait<0>();
    __syncthreads();
    const bool more = begin + Shape::kBlockN < keys;
    if constexpr (Shape::kStages > 1) {
      if (more) {
        loader.aim(begin + Shape::kBlockN);
        loader.template copy<true, true>(kv_tiles + (stage ^ 2 * Shape::kKvBytes));
      }
    } else {
      loader.template copy<false, true>(kv_tiles);
    }
    cp_async_commit();

    const bool active = begin < seen_by_any;
    if (active) {
      state.multiply_k(q_lane, k_lane + stage);
      if (kMasked || begin + Shape::kBlockN > seen_by_all)
        state.template apply_mask<kMasked>(rows, p.mask, work.batch, begin, lane);
      state.raise_references(p.scale_log2);
    }
    if constexpr (Shape::kStages == 1) {
      cp_async_wait<0>();
      __syncthreads();
      if (more) {
        loader.aim(begin + Shape::kBlockN);
        loader.template copy<true, false>(kv_tiles);
      }
      cp_async_commit();
    }
    if (active) state.multiply_v(v_lane + stage, p.scale_log2);
    if constexpr (Shape::kStages > 1) stage ^= 2 * Shape::kKvBytes;
  }
  state.finish(p.scale_log2);

  // The output takes the place of the warp's own rows of Q.
  if (keys <= 0) cp_async_wait<0>();
  __syncwarp();
  const uint32_t out_lane = q_tile + lane / 4 * kRowBytes + lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane / 4;
      const uint32_t key = swizzle_key<kRowBytes>(lane / 4);
#pragma unroll
      for (int n = 0; n < Shape::kDimTiles; ++n)
        st_shared_4(out_lane + (m * 16 + half * 8) * kRowBytes + ((n ^ key) << 4),
                    pack_bf16(state.out[m][n][2 * half], state.out[m][n][2 * half + 1]));
      if (p.lse != nullptr && lane % 4 == 0 && row < rows_left)
        p.lse[work.batch * p.lse_batch + head * p.lse_head + work.start + rows.first + row] =
            state.reference[m][half];
    }
  __syncwarp();
  const int piece = lane % Shape::kPieces;
  __nv_bfloat16* out = p.out + work.batch * p.out_stride.batch + head * p.out_stride.head +
                       (work.start + rows.first) * p.out_stride.row + piece * 8;
#pragma unroll
  for (int i = 0; i < Shape::kWarpRows; i += Shape::kRowsAtOnce) {
    const int row = i + lane / Shape::kPieces;
    if (row < rows_left)
      *reinterpret_cast<uint4*>(out + row * p.out_stride.row) =
          ld_shared_16(q_tile + tile_offset<kRowBytes>(row, piece));
  }
}

}  // namespace astrai::attention
