// SPDX-License-Identifier: Apache-2.0
// Launch plan of prefill attention: a pure function of problem and device, and the tile constants that
// it shares with the kernel.
#pragma once

#include <cstdint>

#include "astrai/host/device.h"
#include "attention/body.h"

namespace astrai::attention {

// Rows of a tile of the packed schedule's maps. Not of a CTA: one takes several tiles or part of one.
constexpr int kQTileRows = 64;

constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps;
constexpr int kPrefillPlaceBytes = 48 * kPrefillWarps;  // behind the tiles
constexpr int kPrefillCtasPerSm = 2;                    // what the registers admit

// Lengths up to this leave room to add a tile to a position.
constexpr int64_t kPrefillMaxLength = int64_t{1} << 30;

constexpr bool is_prefill_head_dim(int64_t head_dim) {
  return head_dim == 32 || head_dim == 64 || head_dim == 128 || head_dim == 256;
}

struct PrefillTile {
  int warp_rows;  // queries of a warp, times heads
  int block_n;    // keys of a step
  int stages;     // pairs of K and V in shared memory; 1: each half is refilled once it is read
  bool q_in_registers;  // else Q's fragments are read from shared memory for each step

  constexpr int block_m() const { return kPrefillWarps * warp_rows; }
  constexpr int smem_bytes(int head_dim) const {
    return 2 * head_dim * (block_m() + 2 * stages * block_n) + kPrefillPlaceBytes;
  }
};

// 228 KB an SM on sm_90 and sm_100, 100 KB elsewhere; compute_80 PTX may run on any of them.
// A mask's bits take registers that scores of 64 keys leave none of at head_dim 128.
constexpr PrefillTile prefill_tile(int image_arch, int head_dim, bool masked) {
  const bool roomy = image_arch >= 90 && image_arch < 120;
  switch (head_dim) {
    case 32:
    case 64: return {32, 64, 2, true};
    case 128:
      return roomy ? PrefillTile{32, masked ? 32 : 64, 2, false} : PrefillTile{32, 32, 1, false};
    default: return roomy ? PrefillTile{16, 64, 1, false} : PrefillTile{16, 32, 1, false};
  }
}

constexpr bool prefill_fits(int image_arch, int head_dim, int ctas, int smem_per_sm) {
  return ctas * (prefill_tile(image_arch, head_dim, false).smem_bytes(head_dim) + 1024) <=
         smem_per_sm;
}

static_assert(prefill_fits(90, 32, 2, 228 * 1024) && prefill_fits(90, 64, 2, 228 * 1024));
static_assert(prefill_fits(90, 128, 2, 228 * 1024) && prefill_fits(90, 256, 2, 228 * 1024));
static_assert(prefill_fits(80, 32, 2, 100 * 1024) && prefill_fits(80, 64, 2, 100 * 1024));
static_assert(prefill_fits(80, 128, 2, 100 * 1024) && prefill_fits(80, 256, 1, 100 * 1024));

struct PrefillProblem {
  int64_t batch, q_len, kv_len;  // dense only
  int64_t q_tiles;               // packed: tiles in the maps; dense: 0
  int64_t q_heads, kv_heads;
  int64_t head_dim;
  bool masked;
};

// A CTA takes `rows` queries of `heads` query heads that share a KV head.
struct PrefillPlan {
  int block_m, block_n, stages;
  int heads_shift;      // log2 of the heads of a CTA
  int rows;             // block_m >> heads_shift
  int tiles;            // dense: CTAs along a sequence
  int section;          // dense: groups of heads whose CTAs are interleaved
  int blocks_per_tile;  // packed: CTAs that share a tile of the maps
  int tiles_per_block;  // packed: tiles of the maps that a CTA takes together
  int64_t grid;
  int smem_bytes;
  bool programmatic;  // launch with programmatic dependent launch

  int heads() const { return 1 << heads_shift; }
};

PrefillPlan plan_prefill(const PrefillProblem& problem, const DeviceInfo& device);

}  // namespace astrai::attention
