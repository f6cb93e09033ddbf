// SPDX-License-Identifier: Apache-2.0
#include "attention/decode_plan.h"

#include <algorithm>
#include <limits>

#include "attention/arrivals.h"

namespace astrai::attention {

namespace {

// A cluster merges sooner than splits do. But of 4 and 8 CTAs clusters find no place on the last SMs of a GPC:
// 32 clusters of 4 or 16 of 8 run in two waves on 132 SMs (2 x 1,024 tokens take 9.5 us, as splits 7.3), and
// 8 of 8 gather on half of the GPCs, with half of the bandwidth.
constexpr int kAnywhere = 2;  // CTAs of a cluster that is placed as well as single ones
constexpr int64_t kClusterTokens = 3072;

// So many tokens are read 1 to 2 % faster by CTAs that start once those of the kernel before have ended. Where
// they are a capacity only, shorter sequences would pay for it, 1 us each.
constexpr int64_t kSerialTokens = 65536;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void expect_at_least_1(const char* name, int64_t value) {
  if (value < 1) throw ValueError(concat(name, ": expected at least 1, got ", value));
}

}  // namespace

DecodePlan plan_decode(const DecodeProblem& p, const DeviceInfo& device) {
  expect_at_least_1("batch", p.batch);
  expect_at_least_1("q_heads", p.q_heads);
  expect_at_least_1("kv_heads", p.kv_heads);
  if (p.q_heads % p.kv_heads != 0)
    throw ValueError(
        concat("q_heads: expected a multiple of kv_heads = ", p.kv_heads, ", got ", p.q_heads));
  if (!is_decode_head_dim(p.head_dim))
    throw ValueError(concat("head_dim: expected 32, 64, 128 or 256, got ", p.head_dim));
  if (p.max_length < 0)
    throw ValueError(concat("max_length: expected at least 0, got ", p.max_length));
  if (device.sm_count < 1)
    throw ValueError(concat("sm_count: expected at least 1, got ", device.sm_count));

  const int head_dim = static_cast<int>(p.head_dim);
  DecodePlan plan{};
  plan.head_groups = static_cast<int>(ceil_div(p.q_heads / p.kv_heads, kDecodeHeads));
  const int64_t units = p.batch * p.kv_heads * plan.head_groups;
  plan.warps = decode_warps(device.image_arch, head_dim, units >= 2 * device.sm_count);
  // One wave of clusters. The split does not follow the lengths: a graph may be replayed with others.
  const int64_t slots =
      int64_t{device.sm_count} * decode_ctas_per_sm(device.image_arch, head_dim, plan.warps);
  const int64_t most =
      std::min(slots / units, ceil_div(p.max_length, plan.warps * decode_tile(head_dim)));
  plan.parts = 1;
  plan.splits = 1;
  int parts = 1;
  if (device.image_arch >= 90)
    while (parts * 2 <= std::min<int64_t>(most, kDecodeMaxParts)) parts *= 2;
  const bool are_placed = (parts == most && parts <= kAnywhere) ||
                          (p.max_length <= kClusterTokens && units * parts * 4 <= slots * 3);
  if (parts > 1 && are_placed)
    plan.parts = parts;
  else
    plan.splits = static_cast<int>(std::max<int64_t>(most, 1));
  plan.merges_inside = plan.splits > 1 && plan.splits <= kMergedInside && units <= kArrivals;
  plan.grid = units * plan.parts * plan.splits;
  if (plan.splits > 1) plan.merge_grid = p.batch * p.q_heads;
  // Sums, then for each head its maximum and its sum of exponentials.
  if (plan.splits > 1) plan.workspace_bytes = plan.grid * kDecodeHeads * (p.head_dim + 2) * 4;
  if (plan.grid > std::numeric_limits<int32_t>::max())
    throw ValueError(concat("batch: expected fewer than 2^31 CTAs, got ", plan.grid));
  plan.smem_bytes = decode_smem_bytes(device.image_arch, head_dim, plan.warps);
  plan.programmatic = device.image_arch >= 90 &&
                      !(p.is_exact && plan.merges_inside && p.max_length >= kSerialTokens);
  expect_smem(device, plan.smem_bytes);
  return plan;
}

}  // namespace astrai::attention
