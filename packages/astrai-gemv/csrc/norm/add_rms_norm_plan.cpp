// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "norm/add_rms_norm.h"

namespace astrai::gemv {

AddRmsNormPlan plan_add_rms_norm(int hidden, bool aligned, const DeviceInfo& device) {
  if (hidden < 1) throw ValueError(concat("hidden: expected at least 1, got ", hidden));
  AddRmsNormPlan plan{};
  plan.vector = aligned && hidden % 8 == 0 ? 8 : 1;
  const int vectors = hidden / plan.vector;
  plan.threads = std::clamp((vectors + 31) / 32 * 32, 32, 1024);
  plan.programmatic = device.image_arch >= 90;
  return plan;
}

}  // namespace astrai::gemv
