// SPDX-License-Identifier: Apache-2.0
#include "gemv/gemv_plan.h"

#include <algorithm>

namespace astrai::gemv {

namespace {

// Rows up to which 8 CTAs share K: 16 for each of 16 clusters.
constexpr int kFewRows = 256;

// CTAs of a cluster that share rows, each with a part of K, so that all of its x stays in registers. That
// takes less time where a cluster has one block of tiles, which is all that the kernel has for it: on an
// H200 at M = 8, 7 to 40 % less over 512 to 4,096 rows of 8,192, 80 % over one row of 16,384. Up to 4 tokens of
// K = 8,192 would stay without, but it does not depend on m: a token's result is the same beside any others.
int parts_of(const GemvProblem& p, RowSource source, const DeviceInfo& device) {
  if (device.image_arch < 90 || source == RowSource::kUnaligned || p.k <= kWindowK) return 1;
  const int64_t rows = int64_t{p.n} * (p.swiglu ? 2 : 1);
  const auto can = [&](int parts) {
    const int clusters = device.sm_count / parts;
    return p.k <= parts * kWindowK && rows <= int64_t{kBlockTiles} * kTileRows * clusters;
  };
  if (rows <= kFewRows && can(8)) return 8;
  return can(2) ? 2 : 1;
}

// Whether there are two CTAs for each SM. Static weights tell of a chain of kernels that start early, in which
// some SMs have room for two CTAs of a kernel when it starts and others for none; of twice as many, those
// that are left come where there is room by then. In a decode step of a 1B Llama (M = 1), after its input, a
// swiglu of 8,192 x 2,048 takes 13.3 us instead of 17.7, the 2,048 x 8,192 behind it, in two parts, 8.8
// instead of 11.0, the head of 128,256 x 2,048 112 to 117 instead of 120 to 190. What it costs is a later
// start of the next kernel: in a chain of its own kind that swiglu takes as long as before, one of 14,336 x
// 4,096 1 to 4 % longer, the head 3 %, two parts 5 % less at M = 1 but 3 % more at M = 8.
constexpr int64_t kMostSwigluBytes = 128'000'000;
constexpr int64_t kLeastLinearBytes = 256'000'000;
constexpr int64_t kLeastPartsBytes = 24'000'000;
constexpr int kLeastOutputs = 16;  // of a CTA

bool is_dealt_out(const GemvProblem& p, int parts, const DeviceInfo& device) {
  if (!p.static_weights || !fits(device.image_arch, 2, device.smem_per_sm)) return false;
  const int64_t bytes = int64_t{p.n} * p.k * (p.swiglu ? 4 : 2);
  if (parts > 1) return parts == 2 && p.m <= 4 && bytes >= kLeastPartsBytes;
  return (p.swiglu ? bytes <= kMostSwigluBytes : bytes >= kLeastLinearBytes) &&
         p.n >= 2 * kLeastOutputs * device.sm_count;
}

}  // namespace

GemvPlan plan_gemv(const GemvProblem& p, const DeviceInfo& device) {
  if (p.m < 1 || p.m > kMaxTokens)
    throw ValueError(concat("m: expected 1..", kMaxTokens, ", got ", p.m));
  if (p.n < 1) throw ValueError(concat("n: expected at least 1, got ", p.n));
  if (p.k < 1) throw ValueError(concat("k: expected at least 1, got ", p.k));
  if (p.row_stride < p.k && p.n > 1)
    throw ValueError(concat("row_stride: expected at least k = ", p.k, ", got ", p.row_stride));
  if (device.sm_count < 1)
    throw ValueError(concat("sm_count: expected at least 1, got ", device.sm_count));

  GemvPlan plan{};
  const bool aligned = p.k % 8 == 0 && p.weight_address % 16 == 0 && p.x_address % 16 == 0 &&
                       (p.n == 1 || p.row_stride % 8 == 0);
  plan.source = p.swiglu  ? RowSource::kSwiglu
                : aligned ? RowSource::kAligned
                          : RowSource::kUnaligned;
  plan.programmatic = device.image_arch >= 90;
  plan.parts = parts_of(p, plan.source, device);
  const int k = (p.k + plan.parts - 1) / plan.parts;
  plan.segments = plan.source != RowSource::kUnaligned && p.m <= kMaxTokens / 2 ? 2 : 1;
  plan.resident = k <= plan.segments * kWindowK;
  // Windows of one size: K = 5,120 is 3 + 2 chunks per warp; 4 + 1 would end in a narrow sweep.
  const int chunks = (k + kWarps * kChunk - 1) / (kWarps * kChunk);
  const int windows = (chunks + kWindow - 1) / kWindow;
  plan.window = (chunks + windows - 1) / windows;
  plan.held = plan.resident ? windows : 1;
  plan.grid = plan.parts * std::min(device.sm_count / plan.parts, p.n);
  // The same number of CTAs for each class of rows.
  if (plan.source == RowSource::kUnaligned)
    plan.grid = plan.grid > kClasses ? plan.grid - plan.grid % kClasses : std::min(kClasses, p.n);
  plan.smem_bytes = smem_bytes(device.image_arch);
  if (plan.programmatic && is_dealt_out(p, plan.parts, device)) plan.grid = 2 * device.sm_count;
  expect_smem(device, plan.smem_bytes);
  return plan;
}

}  // namespace astrai::gemv
