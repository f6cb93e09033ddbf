// SPDX-License-Identifier: Apache-2.0
#include "attention/prefill_plan.h"

#include <algorithm>
#include <limits>

namespace astrai::attention {

namespace {

// K and V that CTAs which run at the same time should share: what an L2 of 40 MB or more keeps beside
// Q and the output.
constexpr int64_t kSharedKvBytes = int64_t{32} << 20;

constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw ValueError(concat(name, ": expected ", low, "..", high, ", got ", value));
}

void check(const PrefillProblem& p) {
  if (!is_prefill_head_dim(p.head_dim))
    throw ValueError(concat("head_dim: expected 32, 64, 128 or 256, got ", p.head_dim));
  check_range("q_heads", p.q_heads, 1, kMaxGrid);
  check_range("kv_heads", p.kv_heads, 1, p.q_heads);
  if (p.q_heads % p.kv_heads != 0)
    throw ValueError(
        concat("kv_heads: expected a divisor of q_heads = ", p.q_heads, ", got ", p.kv_heads));
  check_range("q_tiles", p.q_tiles, 0, kMaxGrid);
  if (p.q_tiles > 0) return;
  check_range("batch", p.batch, 1, kMaxGrid);
  check_range("q_len", p.q_len, 1, kPrefillMaxLength);
  check_range("kv_len", p.kv_len, 0, kPrefillMaxLength);
}

}  // namespace

PrefillPlan plan_prefill(const PrefillProblem& p, const DeviceInfo& device) {
  check(p);
  const PrefillTile tile = prefill_tile(device.image_arch, static_cast<int>(p.head_dim), p.masked);
  PrefillPlan plan{};
  plan.block_m = tile.block_m();
  plan.block_n = tile.block_n;
  plan.stages = tile.stages;
  plan.smem_bytes = tile.smem_bytes(static_cast<int>(p.head_dim));
  plan.programmatic = device.image_arch >= 90;
  expect_smem(device, plan.smem_bytes);

  // Fewer queries of more heads: as much work on as many keys, less of it above the diagonal, and
  // fuller tiles where queries are few.
  const int64_t group = p.q_heads / p.kv_heads;
  plan.heads_shift = group % 4 == 0 ? 2 : group % 2 == 0 ? 1 : 0;
  plan.rows = plan.block_m >> plan.heads_shift;
  plan.blocks_per_tile = std::max(kQTileRows / plan.rows, 1);
  plan.tiles_per_block = std::max(plan.rows / kQTileRows, 1);

  const int64_t groups = p.q_heads >> plan.heads_shift;
  if (p.q_tiles > 0) {
    plan.grid = p.q_tiles * plan.blocks_per_tile * groups;
  } else {
    const int64_t bytes = 4 * p.kv_len * p.head_dim * plan.heads() / group;
    plan.tiles = static_cast<int>(ceil_div(p.q_len, plan.rows));
    plan.grid = plan.tiles * groups;
    check_range("CTAs", plan.grid, 1, kMaxGrid / p.batch);
    plan.section = static_cast<int>(
        std::clamp<int64_t>(kSharedKvBytes / std::max<int64_t>(bytes, 1), 1, groups * p.batch));
    plan.grid *= p.batch;
  }
  check_range("CTAs", plan.grid, 1, kMaxGrid);
  return plan;
}

}  // namespace astrai::attention
