// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace astrai::attention {

// Which bodies the kernels have: on tensor cores, or with ASTRAI_NO_MMA, which no build defines by
// itself, scalar ones of the same results up to rounding.
#if defined(ASTRAI_NO_MMA)
constexpr bool kMma = false;
#else
constexpr bool kMma = true;
#endif

constexpr const char* kBody = kMma ? "mma.sync" : "scalar";

}  // namespace astrai::attention
