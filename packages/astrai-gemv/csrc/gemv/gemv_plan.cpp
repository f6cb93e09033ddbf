// SPDX-License-Identifier: Apache-2.0
#include "gemv/gemv_plan.h"

#include <algorithm>

namespace astrai::gemv {

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
  expect_smem(device, plan.smem_bytes);
  return plan;
}

}  // namespace astrai::gemv
