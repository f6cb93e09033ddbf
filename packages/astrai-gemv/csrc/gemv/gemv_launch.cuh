// SPDX-License-Identifier: Apache-2.0
// From a plan to the launch of an instantiation of gemv_kernel.
#pragma once

#include "astrai/host/launch.h"
#include "gemv/gemv_kernel.cuh"

namespace astrai::gemv {

template <RowSource kSource, bool kResident, bool kSplit, int kSegments, int kHeld>
void launch_instance(const GemvParams& params, const GemvPlan& plan, int device,
                     cudaStream_t stream, const char* what) {
  auto* kernel = gemv_kernel<kSource, kResident, kSplit, kSegments, kHeld>;
  static SmemOptIn opt_in;
  opt_in(kernel, plan.smem_bytes, device, what);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(plan.grid));
  shape.block = dim3(kThreads);
  shape.smem_bytes = plan.smem_bytes;
  shape.programmatic = plan.programmatic;
  shape.cluster = plan.parts;
  launch(kernel, shape, stream, what, params);
}

template <RowSource kSource, int kSegments>
void launch_segments(const GemvParams& params, const GemvPlan& plan, int device,
                     cudaStream_t stream, const char* what) {
  if constexpr (kSource != RowSource::kUnaligned)
    if (plan.parts > 1)
      return launch_instance<kSource, true, true, kSegments, 1>(params, plan, device, stream, what);
  if constexpr (kSegments == 2)
    if (plan.held == 2)
      return launch_instance<kSource, true, false, 2, 2>(params, plan, device, stream, what);
  if (plan.resident)
    launch_instance<kSource, true, false, kSegments, 1>(params, plan, device, stream, what);
  else
    launch_instance<kSource, false, false, kSegments, 1>(params, plan, device, stream, what);
}

template <RowSource kSource>
void launch_source(const GemvParams& params, const GemvPlan& plan, int device, cudaStream_t stream,
                   const char* what) {
  if constexpr (kSource != RowSource::kUnaligned)
    if (plan.segments == 2) return launch_segments<kSource, 2>(params, plan, device, stream, what);
  launch_segments<kSource, 1>(params, plan, device, stream, what);
}

}  // namespace astrai::gemv
