// SPDX-License-Identifier: Apache-2.0
// Decode attention: one query token of each sequence, out = softmax(scale * q K^T) V for every query head.
//
// Algorithm. A step of a warp is a tile of 16 tokens, of 32 for head_dim 32 and 64, with an online softmax
// of its own, on tensor cores (decode_mma.cuh) or without (decode_scalar.cuh). Warps and CTAs keep
// (maximum, sum, accumulator) apart until all tokens are read; they are merged in a fixed order.
//
// Grid. A unit is one KV head of one sequence with up to 8 of its query heads. A cluster of `parts` CTAs,
// or `splits` CTAs, share a unit; their warps take tiles in turn, up to the length that the device finds.
// In a cluster each CTA sends every other one the sums of the outputs that are that one's to finish, by
// stores that count on a barrier of the receiver. Splits leave their sums in a workspace; the one that comes
// last, by a counter (arrivals.h), adds them, or, of very many, merge_kernel, launched behind as a dependent:
// blocks of 8 splits, each in order, then the blocks in order. All are counted, those without tokens too:
// a count that depended on lengths could be left wrong, for every later launch, by one that read them while
// they changed.
//
// Shared memory. Each warp has a ring of K and V tiles filled by cp.async: no CTA barrier in the main
// loop. head_dim 128 on sm_90: 4 or 8 warps x 3 stages x 8 KB + 5 KB of inbox + 2 KB of queries; see
// decode_plan.h.
//
// Masked and absent tokens. Rows at or past the length are zero-filled, not read, and score -inf. A row
// without any token gives 0 and lse -inf.
//
// Dependent launch. Every read follows griddepcontrol.wait: q, the lengths and the newest K and V come
// from the kernels before. With static_cache only q and, where it is given, the newest token do; each warp
// fills its ring ahead, which at head_dim 64 and 16,384 tokens of 8 heads is 25 of 34 MB.
//
// Floor. The bytes of K and V at the read bandwidth, plus 3 us: wait, length and page ids, first tile, merge.
//
// What lost:
// - Clusters of 16: at batch 1 seven of eight find a place, and 131,072 tokens took 153 us. Of 8 at that length:
//   they gather on half of the GPCs, 198 us where splits take 126. Of 9, one on each GPC: 9 % faster for one
//   sequence of 4,096, 10 % slower with static_cache, and a GPC may lack a ninth SM.
// - Twice as many splits by CTAs of four warps, so that no SM is without: 1 % for 131,072.
// - A contiguous range of tokens for each CTA instead of tiles in turn: no better.
// - The release of a cluster barrier in place of counted stores, a fence of the whole GPU: 0.3 us.
// - Four warps on an SM, too few to hide one another: 188 us.
// - Page ids one tile ahead instead of two: 2 % slower over pages of 16; two ahead instead of eight 3 to 8 % from
//   four tiles of a warp on, but with static_cache 3 to 7 % faster. Ids of 32 tiles at once: 3 us slower for one
//   sequence of 32,768 or more.
// - Bringing the first tiles to L2 before the wait by default, of pages by ids read early: 3 to 5 % faster for
//   one sequence of 4,096, 1 to 2 % slower for 8 of 1,024 or 4 of 8,192.
// - No dependent launch of long sequences over pages: 1 % faster for one of 131,072, but a graph planned for
//   that many would take 1 us more at any length.
// - One CTA for all of so few tokens that a warp has four tiles, with nothing to merge: a graph planned for many
//   takes 6.5 us at 512 tokens instead of 4.5.
// - Dependents launched once the length is known, or at the end of long sequences: 0.2 us gained by one sequence
//   of 512, as much lost by others.
// - In a decode step of a 1B Llama with static_cache: half the ring, by four warps or by tiles of 16 tokens, so
//   that the next linear's CTA fits beside: 4 us a call. The merge's dependents launched after its wait or at
//   its end: 1 to 2 us a layer, the next linear fills its ring too late.
#pragma once

#include "astrai/device/async_copy.cuh"
#include "astrai/device/cluster.cuh"
#include "astrai/device/image_arch.cuh"
#include "astrai/device/pdl.cuh"
#include "attention/decode_loads.cuh"
#include "attention/decode_params.h"
#include "attention/tile_ops.cuh"

namespace astrai::attention {

template <int kHeadDim>
constexpr int kMergeThreads = decode_merge_threads(kHeadDim);

// Sums of a CTA's warps, and of a cluster's CTAs, in order of their ranks.
template <int kHeadDim, int kWarps>
struct Merge {
  static constexpr int kPitch = kHeadDim + 4;  // lanes t apart then lie in different banks
  static constexpr int kRingBytes = decode_ring_bytes(kImageArch, kHeadDim, kWarps);
  static constexpr int kBarrierAt = kRingBytes + decode_inbox_bytes(kHeadDim) - 16;
  static constexpr int kStatsAt = kBarrierAt - kDecodeMaxParts * kDecodeHeads * 8;
  static constexpr int kQueriesAt = kBarrierAt + 16;
  static_assert(kQueriesAt % 16 == 0);
  static_assert(kQueriesAt + decode_queries_bytes(kHeadDim) ==
                decode_smem_bytes(kImageArch, kHeadDim, kWarps));

  float* sums;       // [warps][kDecodeHeads][kPitch]
  float2* stats;     // [warps][kDecodeHeads]: maximum, sum
  float* inbox;      // [parts][share]
  float2* in_stats;  // [parts][kDecodeHeads]
  uint32_t barrier;  // counts what arrives in both

  __device__ __forceinline__ explicit Merge(char* smem)
      : sums(reinterpret_cast<float*>(smem)),
        stats(reinterpret_cast<float2*>(smem + kWarps * kDecodeHeads * kPitch * 4)),
        inbox(reinterpret_cast<float*>(smem + kRingBytes)),
        in_stats(reinterpret_cast<float2*>(smem + kStatsAt)),
        barrier(smem_address(smem) + kBarrierAt) {
    static_assert(kWarps * kDecodeHeads * (kPitch * 4 + 8) <= kRingBytes);
    static_assert(kMergedInside / kBlockSplits * kDecodeHeads * (kHeadDim / 4) * 24 <= kRingBytes);
  }
};

// What a partial sum with maximum `mine` counts for beside the overall maximum.
__device__ __forceinline__ float weight_of(float mine, float overall) {
  return overall == kMinusInfinity ? 0.0f : exp2_fast(mine - overall);
}

// Maximum and sum of kCount parts; `stat(i)` is that of part i, and (-inf, 0) of one that is not there.
template <int kCount, class Stat>
__device__ __forceinline__ float2 merged_stats(const Stat& stat) {
  float most = kMinusInfinity, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) most = fmaxf(most, stat(i).x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += stat(i).y * weight_of(stat(i).x, most);
  return make_float2(most, sum);
}

// The same for a quad of outputs, which stays apart from them. Loads of parts that are not there are predicated,
// and their weights 0: branches would make each part wait for the one before.
template <int kCount, class Stat, class Part>
__device__ __forceinline__ float2 merged_parts(int count, const Stat& stat, const Part& part,
                                               float4& sum) {
  float2 stats[kCount];
  float4 parts[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool is_there = i < count;
    stats[i] = is_there ? stat(i) : make_float2(kMinusInfinity, 0.0f);
    parts[i] = is_there ? part(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const float2 all = merged_stats<kCount>([&](int i) { return stats[i]; });
  sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float weight = weight_of(stats[i].x, all.x);
    sum.x += weight * parts[i].x;
    sum.y += weight * parts[i].y;
    sum.z += weight * parts[i].z;
    sum.w += weight * parts[i].w;
  }
  return all;
}

// Adds a part to what is merged so far.
__device__ __forceinline__ void add_part(float2& all, float4& sum, float2 stat, float4 part) {
  const float most = fmaxf(all.x, stat.x);
  const float old_weight = weight_of(all.x, most), weight = weight_of(stat.x, most);
  sum.x = sum.x * old_weight + part.x * weight;
  sum.y = sum.y * old_weight + part.y * weight;
  sum.z = sum.z * old_weight + part.z * weight;
  sum.w = sum.w * old_weight + part.w * weight;
  all = make_float2(most, all.y * old_weight + stat.y * weight);
}

// Four outputs of a query head from the merged sums; without any token zeros, and lse -inf, whatever V
// holds: 0 * NaN is in the sums then. A NaN sum of exponentials is not one without tokens.
template <int kHeadDim, class Kv>
__device__ __forceinline__ void store(const DecodeParams<Kv>& p, int batch, int q_head, int d,
                                      float4 sum, float2 all) {
  const bool none = all.y == 0.0f;
  if (none) sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float norm = none ? 0.0f : 1.0f / all.y;
  const uint2 packed =
      make_uint2(pack_bf16(sum.x * norm, sum.y * norm), pack_bf16(sum.z * norm, sum.w * norm));
  *reinterpret_cast<uint2*>(p.out + batch * p.out_stride.batch + q_head * p.out_stride.head + d) =
      packed;
  if (p.lse != nullptr && d == 0)
    p.lse[int64_t{batch} * p.kv_heads * p.group + q_head] =
        none ? kMinusInfinity : (all.x + log2f(all.y)) * 0.6931471805599453f;
}

// Stores the newest token of a sequence in the pool: nobody reads it there during this launch, loaders
// take it from where it comes (`fresh`). One warp of the whole grid does so for each KV head, or splits
// would write the same row many times over.
template <int kHeadDim>
__device__ __forceinline__ void append(const DecodeParams<PagedKv>& p, int batch, int head,
                                       int length, int lane) {
  const int64_t row = p.kv.base(batch, head) + p.kv.row(p.kv.page(batch, length - 1), length - 1);
  const auto copy = [&](const __nv_bfloat16* pool, const __nv_bfloat16* from) {
    auto* to = reinterpret_cast<uint4*>(const_cast<__nv_bfloat16*>(pool) + row);
    for (int piece = lane; piece < kHeadDim / 8; piece += 32)
      to[piece] = reinterpret_cast<const uint4*>(from)[piece];
  };
  copy(p.kv.k, p.fresh.k + batch * p.fresh.k_stride.batch + head * p.fresh.k_stride.head);
  copy(p.kv.v, p.fresh.v + batch * p.fresh.v_stride.batch + head * p.fresh.v_stride.head);
}

// A quad of outputs of up to kBlockSplits splits. `part` and `stat` are the first one's.
template <int kHeadDim>
__device__ __forceinline__ float2 merged_block(const float* part, const float2* stat, int splits,
                                               float4& sum) {
  return merged_parts<kBlockSplits>(
      splits, [&](int i) { return __ldcg(stat + i * kDecodeHeads); },
      [&](int i) {
        return __ldcg(reinterpret_cast<const float4*>(part + i * kDecodeHeads * kHeadDim));
      },
      sum);
}

// What a thread adds of a unit: a quad of a block of splits, item i of blocks * quads.
template <int kHeadDim>
struct SplitItem {
  int block, quad;
  const float* part;
  const float2* stat;

  template <class Kv>
  __device__ __forceinline__ SplitItem(const DecodeParams<Kv>& p, int unit, int i, int quads)
      : block(i / quads), quad(i - block * quads) {
    const int64_t at =
        (int64_t{unit} * p.splits + block * kBlockSplits) * kDecodeHeads + quad / (kHeadDim / 4);
    part = p.sums + at * kHeadDim + quad % (kHeadDim / 4) * 4;
    stat = p.stats + at;
  }

  // Has the compiler compute it here, and not where it is used.
  __device__ __forceinline__ void pin() {
    asm volatile("" : "+r"(block), "+r"(quad), "+l"(part), "+l"(stat));
  }
};

// Merges the first `splits` splits of a unit, which are those with tokens. `item` is number threadIdx.x; `smem`
// holds sums of blocks.
template <int kHeadDim, int kThreads, class Kv, class Store>
__device__ __forceinline__ void merge_splits(const DecodeParams<Kv>& p, int unit, int splits,
                                             int quads, SplitItem<kHeadDim> item, char* smem,
                                             const Store& store_quad) {
  const int blocks = (splits + kBlockSplits - 1) / kBlockSplits;
  auto* const sums = reinterpret_cast<float4*>(smem);
  auto* const stats = reinterpret_cast<float2*>(sums + blocks * quads);
  for (int i = threadIdx.x; i < blocks * quads;) {
    float4 sum;
    const float2 all =
        merged_block<kHeadDim>(item.part, item.stat, splits - item.block * kBlockSplits, sum);
    if (blocks == 1) {
      store_quad(item.quad / (kHeadDim / 4), item.quad % (kHeadDim / 4) * 4, sum, all);
    } else {
      sums[i] = sum;
      stats[i] = all;
    }
    i += kThreads;
    if (i < blocks * quads) item = SplitItem<kHeadDim>(p, unit, i, quads);
  }
  if (blocks == 1) return;
  __syncthreads();
  for (int quad = threadIdx.x; quad < quads; quad += kThreads) {
    float4 sum = sums[quad];
    float2 all = stats[quad];
    for (int block = 1; block < blocks; ++block)
      add_part(all, sum, stats[block * quads + quad], sums[block * quads + quad]);
    store_quad(quad / (kHeadDim / 4), quad % (kHeadDim / 4) * 4, sum, all);
  }
}

// Whether this CTA is the last of `count` whose stores are done; then all of those can be read. The barriers
// make thread 0's release stand for the stores of all, and its acquire for their reads. `flag`: a place in
// shared memory.
__device__ __forceinline__ bool comes_last(unsigned* arrivals, int count, volatile int* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    // The last one leaves 0.
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(arrivals), "r"(count - 1)
                 : "memory");
    *flag = before == static_cast<unsigned>(count - 1);
  }
  __syncthreads();
  return *flag != 0;
}

template <class Warp, int kWarps, class Kv>
__device__ __forceinline__ void decode_cta(const DecodeParams<Kv>& p) {
  constexpr int kHeadDim = Warp::kHeadDim;
  using Loader = TileLoader<kHeadDim, Kv>;
  constexpr int kStages = Loader::kStages;
  extern __shared__ __align__(128) char smem[];

  pdl_launch_dependents();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int rank = p.parts > 1 ? cluster_rank() : 0;
  const int split = blockIdx.x / p.parts % p.splits;
  const int unit = blockIdx.x / p.parts / p.splits;
  const int first_head = unit % p.head_groups * kDecodeHeads;  // of the KV head's group
  const int head = unit / p.head_groups % p.kv_heads;
  const int batch = unit / p.head_groups / p.kv_heads;
  const int heads = min(kDecodeHeads, p.group - first_head);
  const Merge<kHeadDim, kWarps> merge(smem);
  // Quads of outputs; part r finishes quads r, r + parts, ...
  const int quads = heads * (kHeadDim / 4);
  const int share = (quads + p.parts - 1) >> p.parts_log2;
  const int mine = (quads - rank + p.parts - 1) >> p.parts_log2;
  if (p.parts > 1) {
    if (threadIdx.x == 0)
      init_inbox(merge.barrier,
                 p.parts * (mine * int{sizeof(float4)} + kDecodeHeads * int{sizeof(float2)}));
    cluster_arrive();
  }
  // Before the wait there is time for it.
  SplitItem<kHeadDim> item(p, unit, threadIdx.x, quads);
  item.pin();
  const bool early = Loader::kPaged && p.static_cache;
  // In turn, so that a cluster sweeps its sequence: parts that start a power of two apart would meet in
  // the same DRAM channels.
  const int first = (split * p.parts + rank) * kWarps + warp;
  const int step = p.splits * p.parts * kWarps;
  const uint32_t ring = smem_address(smem) + warp * kStages * Loader::kStageBytes;
  Loader loader(p, batch, head, first, step, lane, ring);
  QueryPieces<kHeadDim, kWarps * 32> queries(p, batch, head * p.group + first_head, heads);
  if (!early) pdl_wait();

  loader.load_pages();
  const int length = min(max(p.kv.kv_len(batch), 0), p.max_length);
  // Before the ring's copies: behind them they would come when the first two tiles are there.
  if (!early) queries.load();
  const int tiles = (length + Loader::kTile - 1) / Loader::kTile;
  // Splits with tokens; merge_kernel does not know the length.
  const bool inside = p.arrivals != nullptr;
  const int used = inside ? min(p.splits, max(1, (tiles + kWarps - 1) / kWarps)) : p.splits;
  loader.length = length;
  // Over pages a warp waits for their ids anyway, and the queries come with them; else these stores, which wait
  // for the queries, would hold up the ring's copies.
  const bool puts_first = Loader::kPaged && !early;
  if (puts_first) queries.template put<Warp>(smem + merge.kQueriesAt);
  // Before the wait there is time to fill the ring.
  for (int i = 0; i < (early ? kStages : kStages - 1); ++i) {
    if (early && loader.has_fresh()) pdl_wait();
    loader.issue();
  }
  if (early) {
    pdl_wait();
    queries.load();
  }

  if (split < used) {
    Warp state;
    if (!puts_first) queries.template put<Warp>(smem + merge.kQueriesAt);
    __syncthreads();
    state.load_q(smem + merge.kQueriesAt, lane);
    if constexpr (Loader::kPaged) {
      if (p.fresh.k != nullptr && first_head == 0 && split == 0 && rank == 0 &&
          warp == kWarps - 1 && length > 0)
        append<kHeadDim>(p, batch, head, length, lane);
    }

    int slot = 0;
    for (int tile = first; tile < tiles; tile += step) {
      bool keep[Warp::kTokens];
#pragma unroll
      for (int i = 0; i < Warp::kTokens; ++i) {
        const int position = tile * Loader::kTile + Warp::token_of(lane, i);
        keep[i] = position < length;
        if (p.mask.data != nullptr && keep[i])
          keep[i] = p.mask.data[batch * p.mask.batch_stride + position * p.mask.key_stride] != 0;
      }
      if (early && tile == first)
        cp_async_wait<kStages - 1>();
      else
        cp_async_wait<kStages - 2>();
      // The tile is there for all lanes, and all have read the one before, whose slot is filled now.
      __syncwarp();
      // What was filled before the wait is full still.
      if (!early || tile > first) loader.issue();
      const uint32_t stage = ring + slot * Loader::kStageBytes;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      state.add(keep, stage, stage + Loader::kStageBytes / 2, p.scale_log2, lane);
    }

    cp_async_wait<0>();
    __syncthreads();
    state.put(merge.sums + warp * kDecodeHeads * merge.kPitch, merge.stats + warp * kDecodeHeads,
              merge.kPitch, lane);
    if (p.parts > 1) cluster_wait();
    __syncthreads();

    for (int quad = threadIdx.x; quad < quads; quad += kWarps * 32) {
      const int h = quad / (kHeadDim / 4);
      const int d = quad % (kHeadDim / 4) * 4;
      float4 sum;
      const float2 cta = merged_parts<kWarps>(
          kWarps, [&](int w) { return merge.stats[w * kDecodeHeads + h]; },
          [&](int w) {
            return *reinterpret_cast<const float4*>(
                merge.sums + (w * kDecodeHeads + h) * Merge<kHeadDim, kWarps>::kPitch + d);
          },
          sum);
      if (used > 1) {
        float* place = p.sums + (blockIdx.x * kDecodeHeads + h) * int64_t{kHeadDim} + d;
        *reinterpret_cast<float4*>(place) = sum;
      } else if (p.parts > 1) {
        const int index = rank * share + (quad >> p.parts_log2);
        send(smem_address(merge.inbox + index * 4), merge.barrier, quad & (p.parts - 1), sum);
      } else {
        store<kHeadDim>(p, batch, head * p.group + first_head + h, d, sum, cta);
      }
    }
    // From the last thread on: the first ones may have a quad above.
    for (int i = kWarps * 32 - 1 - threadIdx.x; i < p.parts * kDecodeHeads; i += kWarps * 32) {
      const int h = i % kDecodeHeads;
      const float2 cta =
          merged_stats<kWarps>([&](int w) { return merge.stats[w * kDecodeHeads + h]; });
      if (used > 1)
        p.stats[int64_t{blockIdx.x} * kDecodeHeads + h] = cta;
      else if (p.parts > 1)
        send(smem_address(merge.in_stats + rank * kDecodeHeads + h), merge.barrier,
             i / kDecodeHeads, cta);
    }
  }
  if (p.splits > 1) {
    auto* const flag = reinterpret_cast<int*>(smem + merge.kBarrierAt);
    if (!inside || !comes_last(p.arrivals + unit, p.splits, flag) || used == 1) return;
    merge_splits<kHeadDim, kWarps * 32>(
        p, unit, used, quads, item, smem, [&](int h, int d, float4 sum, float2 all) {
          store<kHeadDim>(p, batch, head * p.group + first_head + h, d, sum, all);
        });
    return;
  }
  if (p.parts == 1) return;
  wait_for_inbox(merge.barrier);
  for (int i = threadIdx.x; i < mine; i += kWarps * 32) {
    const int quad = i * p.parts + rank;
    const int h = quad / (kHeadDim / 4);
    const int d = quad % (kHeadDim / 4) * 4;
    float4 sum;
    const float2 all = merged_parts<kDecodeMaxParts>(
        p.parts, [&](int r) { return merge.in_stats[r * kDecodeHeads + h]; },
        [&](int r) { return *reinterpret_cast<const float4*>(merge.inbox + (r * share + i) * 4); },
        sum);
    store<kHeadDim>(p, batch, head * p.group + first_head + h, d, sum, all);
  }
}

// Where no plan for the architecture asks for so many warps, its image has a kernel that only fails.
template <int kHeadDim, int kWarps>
constexpr bool kPlanned = is_decode_warps(kImageArch, kHeadDim, kWarps);

template <class Warp, int kWarps, class Kv>
__global__ void __launch_bounds__(32 * kWarps,
                                  decode_ctas_per_sm(kImageArch, Warp::kHeadDim, kWarps))
    decode_kernel(const __grid_constant__ DecodeParams<Kv> p) {
  if constexpr (kPlanned<Warp::kHeadDim, kWarps>)
    decode_cta<Warp, kWarps>(p);
  else
    __trap();
}

// Merges the splits of one query head. A CTA has threads for its quads several times over; the n-th of a
// quad's threads takes blocks n, n + kTimes, ... of splits.
template <int kHeadDim, class Kv>
__global__ void __launch_bounds__(kMergeThreads<kHeadDim>)
    merge_kernel(const __grid_constant__ DecodeParams<Kv> p) {
  constexpr int kQuads = kHeadDim / 4;
  constexpr int kTimes = kMergeThreads<kHeadDim> / kQuads;
  static_assert(kTimes >= 4);
  __shared__ float4 sums[kTimes][kQuads];
  __shared__ float2 stats[kTimes];

  pdl_launch_dependents();
  const int q_head = blockIdx.x % (p.kv_heads * p.group);
  const int batch = blockIdx.x / (p.kv_heads * p.group);
  const int in_group = q_head % p.group;
  const int unit =
      (batch * p.kv_heads + q_head / p.group) * p.head_groups + in_group / kDecodeHeads;
  const int h = in_group % kDecodeHeads;
  const int quad = threadIdx.x % kQuads;
  const int time = threadIdx.x / kQuads;
  const int64_t at = int64_t{unit} * p.splits * kDecodeHeads + h;
  pdl_wait();

  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 all = make_float2(kMinusInfinity, 0.0f);
  for (int block = time; block * kBlockSplits < p.splits; block += kTimes) {
    const int first = block * kBlockSplits;
    const int64_t from = at + int64_t{first} * kDecodeHeads;
    float4 some;
    const float2 mine = merged_block<kHeadDim>(p.sums + from * kHeadDim + quad * 4, p.stats + from,
                                               p.splits - first, some);
    add_part(all, sum, mine, some);
  }
  sums[time][quad] = sum;
  if (quad == 0) stats[time] = all;
  __syncthreads();
  if (time > 0) return;
#pragma unroll
  for (int i = 1; i < kTimes; ++i) add_part(all, sum, stats[i], sums[i][quad]);
  store<kHeadDim>(p, batch, q_head, quad * 4, sum, all);
}

}  // namespace astrai::attention
