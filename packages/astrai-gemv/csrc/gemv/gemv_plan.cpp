// SPDX-License-Identifier: Apache-2.0
#include "gemv/gemv_plan.h"

#include <algorithm>

namespace astrai::gemv {

namespace {

// Whether a swiglu kernel has two CTAs for each SM. Static weights tell of a chain of kernels that start
// early, in which some SMs have room for two CTAs of a kernel when it starts and others for none; of twice as
// many, those that are left come where there is room by then. In a decode step of a 1B Llama a swiglu of
// 8,192 x 2,048 takes 13.3 us after its input instead of 17.7 (M = 1); in a chain of its own kind it takes
// as long as before, from M = 1 to 8. What it costs is a later start of the next kernel: 14,336 x 4,096 in a
// chain of its own kind takes 1 to 4 % longer. The limits lie between what was measured.
constexpr int64_t kMostBytes = 128'000'000;
constexpr int kLeastOutputs = 16;  // of a CTA

bool is_dealt_out(const GemvProblem& p, const DeviceInfo& device) {
  return p.swiglu && p.static_weights && fits(device.image_arch, 2, device.smem_per_sm) &&
         int64_t{p.n} * p.k * 4 <= kMostBytes && p.n >= 2 * kLeastOutputs * device.sm_count;
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
  plan.resident = p.k <= kResidentK;
  // Windows of one size: K = 5,120 is 3 + 2 chunks per warp; 4 + 1 would end in a narrow sweep.
  const int chunks = (p.k + kWarps * kChunk - 1) / (kWarps * kChunk);
  const int windows = (chunks + kWindow - 1) / kWindow;
  plan.window = (chunks + windows - 1) / windows;
  plan.grid = std::min(device.sm_count, p.n);
  // The same number of CTAs for each class of rows.
  if (plan.source == RowSource::kUnaligned)
    plan.grid = plan.grid > kClasses ? plan.grid - plan.grid % kClasses : std::min(kClasses, p.n);
  plan.smem_bytes = smem_bytes(device.image_arch);
  plan.programmatic = device.image_arch >= 90;
  if (plan.programmatic && is_dealt_out(p, device)) plan.grid = 2 * device.sm_count;
  expect_smem(device, plan.smem_bytes);
  return plan;
}

}  // namespace astrai::gemv
