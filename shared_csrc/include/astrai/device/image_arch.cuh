// SPDX-License-Identifier: Apache-2.0
// The architecture that device code is compiled for; plans have the same of the loaded image in DeviceInfo.
#pragma once

namespace astrai {

#if defined(__CUDA_ARCH__)
constexpr int kImageArch = __CUDA_ARCH__ / 10;
#else
constexpr int kImageArch = 80;
#endif

}  // namespace astrai
