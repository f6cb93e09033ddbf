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
// is two shuffles and an addition, whatever the page size. Two shuffles a step where all its rows lie in one
// page, chosen by a branch at each row: 1 to 7 % slower over pages of 16.
//
// Floor. 4 * rows * keys * head_dim operations a head; mma.sync gives about 60 % of the peak of sm_90.
// 2 CTAs on an SM share it: one's softmax covers the other's MMAs.
#pragma once

#include "astrai/device/image_arch.cuh"
#include "astrai/device/mma.cuh"
#include "astrai/device/pdl.cuh"
#include "attention/prefill_cta.cuh"

namespace astrai::attention {

// The state of a softmax, for rows lane / 4 and lane / 4 + 8 of each MMA tile. Scores exceed `reference`,
// which is one of them, by at most the slack; it is -inf before the first key. `sum` is the lane's part.
template <int kHeadDim, bool kMasked>
struct WarpState {
  using Shape = PrefillShape<kHeadDim, kMasked>;
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
          const uint32_t (&a)[4] = q[slot][m];
          mma_m16n8k16_bf16(score[m][n], a[0], a[1], a[2], a[3], k[0], k[2]);
          mma_m16n8k16_bf16(score[m][n + 1], a[0], a[1], a[2], a[3], k[1], k[3]);
        }
      }
    }
  }

  // The mask's bytes for the scores of a step, as bits: those of row half h of tile m from bit 16 * h
  // of keep[m] on. Before the scores are computed, while there are registers for the loads.
  __device__ __forceinline__ void load_mask(const WarpRows& rows, int64_t row_stride,
                                            const WarpPlace& place, int begin, int lane,
                                            uint32_t (&keep)[Shape::kRowTiles]) const {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
      keep[m] = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + lane / 4;
        __syncwarp();  // one row's loads at a time, for want of registers
        const int key = begin + lane % 4 * 2;
        const uint8_t* bytes = place.mask + row * row_stride + key;
        // The mask has no rows past the last query; what becomes of them is not stored.
        const int left = row < place.count ? rows.kv_len - key : 0;
#pragma unroll
        for (int n = 0; n < Shape::kKeyTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i < left && __ldca(bytes + n * 8 + i) != 0)
              keep[m] |= 1u << (16 * half + 2 * n + i);
      }
    }
  }

  __device__ __forceinline__ void apply_mask(const uint32_t (&keep)[Shape::kRowTiles]) {
    static_assert(Shape::kKeyTiles <= 8);
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < Shape::kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if ((keep[m] & 1u << (i / 2 * 16 + 2 * n + i % 2)) == 0) score[m][n][i] = -INFINITY;
  }

  // Scores of keys past what a row may see become -inf.
  __device__ __forceinline__ void apply_limits(const WarpRows& rows, int begin, int lane) {
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int limit = rows.limit(m * 16 + half * 8 + lane / 4) - begin - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < Shape::kKeyTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i >= limit) score[m][n][2 * half + i] = -INFINITY;
      }
  }

  // Moves the references, and what was summed relative to them, where scores have outgrown them.
  __device__ __forceinline__ void raise_references(float scale_log2, float slack) {
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
        // Not that of a row that has not: what becomes of a row depends on no other.
        const float now = top[m][half] > old + slack ? top[m][half] : old;
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
          // Not multiplied by 0: where no key was seen, 0 * NaN of V may be in the sums.
          out[m][n][2 * half] = none ? 0.0f : out[m][n][2 * half] * inverse;
          out[m][n][2 * half + 1] = none ? 0.0f : out[m][n][2 * half + 1] * inverse;
        }
      }
  }
};

// Not kept in registers across the main loop.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

template <int kHeadDim, class Schedule, class Kv, bool kMasked>
__global__ void __launch_bounds__(kPrefillThreads, kPrefillCtasPerSm)
    prefill_kernel(const __grid_constant__ PrefillParams<Schedule, Kv> p) {
  using Shape = PrefillShape<kHeadDim, kMasked>;
  constexpr int kRowBytes = Shape::kRowBytes;
  constexpr bool kPaged = std::is_same_v<Kv, PagedKv>;
  extern __shared__ __align__(1024) unsigned char prefill_smem[];

  pdl_launch_dependents();
  const int lane = threadIdx.x % 32;
  // A value known to be uniform leaves the vector registers, which ptxas else overfills there.
  constexpr bool kUniform = kPaged && kImageArch >= 100;
  const int warp = kUniform ? __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) : threadIdx.x / 32;
  const uint32_t q_tile = smem_address(prefill_smem) + warp * Shape::kWarpRows * kRowBytes;
  const uint32_t kv_tiles = smem_address(prefill_smem) + Shape::kQBytes;

  pdl_wait();
  auto* const places = warp_places<kHeadDim, kMasked>(prefill_smem);
  WarpPlace& place = places[warp];
  WarpWork work;
  if (!begin_warp<kHeadDim, kMasked>(p, q_tile, place, warp, lane, work)) return;
  const WarpRows& rows = work.rows;
  const int keys = work.keys;
  KvLoader<kHeadDim, Kv, kMasked> loader(p.kv, place, work.batch, work.head / p.group, rows.kv_len,
                                         warp, lane);
  if (keys > 0) loader.template copy<true, (Shape::kStages > 1)>(0, kv_tiles);
  cp_async_commit();

  // The same of all tiles: ldmatrix transposes V, and gives the fragments of K in another order.
  const uint32_t lane_place = tile_offset<kRowBytes>(lane % 16, lane / 16);
  const uint32_t q_lane = q_tile + lane_place;
  WarpState<kHeadDim, kMasked> state;
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
        loader.advance(begin + Shape::kBlockN);
        loader.template copy<true, true>(begin + Shape::kBlockN,
                                         kv_tiles + (stage ^ 2 * Shape::kKvBytes));
      }
    } else {
      loader.template copy<false, true>(begin, kv_tiles);
    }
    cp_async_commit();

    const bool active = begin < rows.visible + Shape::kWarpRows - 1;
    if (active) {
      uint32_t keep[Shape::kRowTiles];
      if constexpr (kMasked) state.load_mask(rows, p.mask.row_stride, place, begin, lane, keep);
      state.multiply_k(q_lane, kv_tiles + stage + lane_place);
      if constexpr (kMasked) state.apply_mask(keep);
      if (begin + Shape::kBlockN > rows.visible || begin + Shape::kBlockN > rows.kv_len)
        state.apply_limits(rows, begin, lane);
      state.raise_references(p.scale_log2, p.slack);
    }
    if constexpr (Shape::kStages == 1) {
      cp_async_wait<0>();
      __syncthreads();
      if (more) {
        loader.advance(begin + Shape::kBlockN);
        loader.template copy<true, false>(begin + Shape::kBlockN, kv_tiles);
      }
      cp_async_commit();
    }
    if (active) state.multiply_v(kv_tiles + stage + lane_place + Shape::kKvBytes, p.scale_log2);
    if constexpr (Shape::kStages > 1) stage ^= 2 * Shape::kKvBytes;
  }
  state.finish(p.scale_log2);

  // The output takes the place of the warp's own rows of Q.
  if (keys <= 0) cp_async_wait<0>();
  __syncwarp();
  const int thread = thread_index();
  const int out_lane = thread % 32;
  const int out_warp = thread / 32;
  const uint32_t out_tile = smem_address(prefill_smem) + out_warp * Shape::kWarpRows * kRowBytes;
  const WarpPlace& to = places[out_warp];
  const uint32_t out_row = out_tile + out_lane / 4 * kRowBytes + out_lane % 4 * 4;
  const uint32_t key = swizzle_key<kRowBytes>(out_lane / 4);
#pragma unroll
  for (int m = 0; m < Shape::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < Shape::kDimTiles; ++n)
        st_shared_4(out_row + (m * 16 + half * 8) * kRowBytes + ((n ^ key) << 4),
                    pack_bf16(state.out[m][n][2 * half], state.out[m][n][2 * half + 1]));
      const int row = m * 16 + half * 8 + out_lane / 4;
      if (p.lse != nullptr && out_lane % 4 == 0 && row < to.count)
        p.lse[to.lse + row] = state.reference[m][half];
    }
  __syncwarp();
  const int piece = out_lane % Shape::kPieces;
  __nv_bfloat16* out = p.out + to.out + piece * 8;
#pragma unroll
  for (int i = 0; i < Shape::kWarpRows; i += Shape::kRowsAtOnce) {
    const int row = i + out_lane / Shape::kPieces;
    if (row < to.count)
      *reinterpret_cast<uint4*>(out + row * p.out_stride.row) =
          ld_shared_16(out_tile + tile_offset<kRowBytes>(row, piece));
  }
}

}  // namespace astrai::attention
