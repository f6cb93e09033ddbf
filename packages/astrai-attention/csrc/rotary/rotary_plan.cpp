// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "rotary/rotary.h"

namespace astrai::attention {

namespace {

// Threads that keep an SM's memory pipeline full. More of them gain nothing, so that from there on a
// thread takes more heads instead: it loads the angles once for all of them.
constexpr int64_t kFullSm = 1024;
constexpr int kMinThreads = 64;
constexpr int kMaxBlockZ = 64;  // of CUDA

template <class T>
T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace

RotaryPlan plan_rotary(const RotaryProblem& p, const DeviceInfo& device) {
  if (p.tokens < 1 || p.tokens > std::numeric_limits<int32_t>::max())
    throw ValueError(concat("tokens: expected 1..2147483647, got ", p.tokens));
  if (p.heads < 1 || p.heads > 65535)
    throw ValueError(concat("heads: expected 1..65535, got ", p.heads));
  if (p.head_dim < 16 || p.head_dim > kRotaryMaxHeadDim || p.head_dim % 16 != 0)
    throw ValueError(concat("head_dim: expected a multiple of 16 in 16..", kRotaryMaxHeadDim,
                            ", got ", p.head_dim));
  if (device.sm_count < 1)
    throw ValueError(concat("sm_count: expected at least 1, got ", device.sm_count));

  RotaryPlan plan{};
  plan.block_x = p.head_dim / (p.interleaved ? 8 : 16);
  const auto threads_with = [&](int heads_per_thread) {
    return p.tokens * ceil_div(p.heads, heads_per_thread) * plan.block_x;
  };
  plan.heads_per_thread = 4;
  while (plan.heads_per_thread > 1 &&
         (plan.heads_per_thread > p.heads ||
          threads_with(plan.heads_per_thread) < kFullSm * device.sm_count))
    plan.heads_per_thread /= 2;
  plan.groups = ceil_div(p.heads, plan.heads_per_thread);

  // Few threads are spread over many SMs: a decode step is all latency.
  const int64_t total = threads_with(plan.heads_per_thread);
  int threads = kMinThreads;
  while (threads < kRotaryThreads && total > int64_t{threads} * device.sm_count) threads *= 2;

  // Tiles of groups of one size: 33 groups are 17 + 16, not 32 + 1.
  const int most = std::max(threads / plan.block_x, 1);
  plan.grid_y = ceil_div(plan.groups, most);
  plan.block_y = ceil_div(plan.groups, plan.grid_y);
  plan.block_z = std::clamp(threads / (plan.block_x * plan.block_y), 1, kMaxBlockZ);
  plan.block_z = static_cast<int>(std::min<int64_t>(plan.block_z, p.tokens));
  plan.grid_x = static_cast<int>(ceil_div<int64_t>(p.tokens, plan.block_z));
  plan.programmatic = device.image_arch >= 90;
  return plan;
}

}  // namespace astrai::attention
