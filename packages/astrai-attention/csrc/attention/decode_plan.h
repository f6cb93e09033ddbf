// SPDX-License-Identifier: Apache-2.0
// Launch plan of decode attention: a pure function of problem and device, and the tile constants that it
// shares with the kernel.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "astrai/host/device.h"
#include "attention/body.h"

namespace astrai::attention {

constexpr int kDecodeHeads = 8;  // query heads of a CTA: the N operand

// CTAs of a cluster: of 16, with an SM each, an H200 runs seven at a time.
constexpr int kDecodeMaxParts = 8;

// One CTA reads the sums of so many splits in a microsecond or two; of more, a second kernel's many CTAs.
constexpr int kMergedInside = 32;
constexpr int kBlockSplits = 8;  // that a thread reads at a time

// Threads of a CTA of the second kernel, which has one for each query head of each sequence: at least 4 for each
// quad of outputs, so that of up to 32 splits each adds one block, as the CTA that comes last does.
constexpr int decode_merge_threads(int head_dim) { return head_dim < 128 ? 128 : head_dim; }

// Tokens of a step of a warp, in blocks of 16, the M operand of the MMA. A step's softmax costs the same
// for both, which short rows feel.
constexpr int decode_tile(int head_dim) { return head_dim <= 64 ? 32 : 16; }

constexpr bool is_decode_head_dim(int64_t head_dim) {
  return head_dim == 32 || head_dim == 64 || head_dim == 128 || head_dim == 256;
}

// 228 KB of shared memory an SM on sm_90 and sm_100, 100 KB elsewhere; compute_80 PTX may run anywhere.
constexpr bool is_roomy(int image_arch) { return image_arch >= 90 && image_arch < 120; }

// Warps of a CTA. Eight hide one another's latency where one CTA has an SM to itself; where there are
// CTAs for two on every SM, four, so that one starts while the other ends.
constexpr int decode_warps(int image_arch, int head_dim, bool many_units) {
  if (head_dim == 256) return is_roomy(image_arch) ? 4 : 2;
  return is_roomy(image_arch) && !many_units ? 8 : 4;
}

// Whether a plan may ask for so many.
constexpr bool is_decode_warps(int image_arch, int head_dim, int warps) {
  return warps == decode_warps(image_arch, head_dim, false) ||
         warps == decode_warps(image_arch, head_dim, true);
}

// K and V of a tile, for each warp.
constexpr int decode_stages(int image_arch, int head_dim) {
  return head_dim == 32 ? 4 : is_roomy(image_arch) ? 3 : 2;
}

constexpr int decode_ctas_per_sm(int image_arch, int head_dim, int warps) {
  return is_roomy(image_arch) && head_dim <= 128 && warps == 4 ? 2 : 1;
}

constexpr int decode_stage_bytes(int head_dim) { return 2 * decode_tile(head_dim) * head_dim * 2; }

constexpr int decode_ring_bytes(int image_arch, int head_dim, int warps) {
  return warps * decode_stages(image_arch, head_dim) * decode_stage_bytes(head_dim);
}

// What the parts of a cluster send: each its sums of this part's outputs, and for each head its maximum
// and its sum of exponentials; and the barrier that counts them.
constexpr int decode_inbox_bytes(int head_dim) {
  return kDecodeHeads * head_dim * 4 + kDecodeMaxParts * (16 + kDecodeHeads * 8) + 16;
}

// The queries, in bf16 for the MMAs, else in fp32.
constexpr int decode_queries_bytes(int head_dim) {
  return kDecodeHeads * head_dim * (kMma ? 2 : 4);
}

constexpr int decode_smem_bytes(int image_arch, int head_dim, int warps) {
  return decode_ring_bytes(image_arch, head_dim, warps) + decode_inbox_bytes(head_dim) +
         decode_queries_bytes(head_dim);
}

constexpr bool decode_fits(int image_arch, int smem_per_sm) {
  for (int head_dim = 32; head_dim <= 256; head_dim *= 2)
    for (bool many : {false, true}) {
      const int warps = decode_warps(image_arch, head_dim, many);
      if (decode_ctas_per_sm(image_arch, head_dim, warps) *
              (decode_smem_bytes(image_arch, head_dim, warps) + 1024) >
          smem_per_sm)
        return false;
    }
  return true;
}

static_assert(decode_fits(90, 228 * 1024) && decode_fits(80, 100 * 1024));

struct DecodeProblem {
  int64_t batch;
  int64_t q_heads, kv_heads;
  int64_t head_dim;
  int64_t max_length;  // of the sequences, now and in any replay of a graph of the launch
  bool is_exact;       // that is their length
};

struct DecodePlan {
  int head_groups;          // CTAs that share a KV head, each with up to kDecodeHeads query heads
  int parts;                // CTAs of a cluster, among which the tokens of a sequence are split
  int splits;               // CTAs among which they are split; 1 with parts > 1
  bool merges_inside;       // the last of them merges, if counters are left (arrivals.h)
  int64_t merge_grid;       // of the second kernel; 0 without splits
  int warps;                // of a CTA
  int64_t grid;             // batch * kv_heads * head_groups * parts * splits
  int64_t workspace_bytes;  // 0 without splits
  int smem_bytes;
  bool programmatic;  // launch with programmatic dependent launch
};

DecodePlan plan_decode(const DecodeProblem& problem, const DeviceInfo& device);

}  // namespace astrai::attention
