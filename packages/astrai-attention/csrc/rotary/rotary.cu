// SPDX-License-Identifier: Apache-2.0
#include "rotary/rotary.h"

#include "astrai/host/launch.h"
#include "rotary/rotary_kernel.cuh"

namespace astrai::attention {

namespace {

template <bool kInterleaved>
void launch_pairing(const RotaryParams& params, const RotaryPlan& plan, const LaunchShape& shape,
                    cudaStream_t stream) {
  const auto run = [&](void (*kernel)(RotaryParams, int)) {
    launch(kernel, shape, stream, "rotary_emb", params, plan.groups);
  };
  switch (plan.heads_per_thread) {
    case 1: return run(rotary_kernel<kInterleaved, 1>);
    case 2: return run(rotary_kernel<kInterleaved, 2>);
    default: return run(rotary_kernel<kInterleaved, 4>);
  }
}

}  // namespace

void launch_rotary(const RotaryParams& params, const RotaryPlan& plan, bool interleaved,
                   cudaStream_t stream) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(plan.grid_x), static_cast<unsigned>(plan.grid_y));
  shape.block = dim3(static_cast<unsigned>(plan.block_x), static_cast<unsigned>(plan.block_y),
                     static_cast<unsigned>(plan.block_z));
  shape.programmatic = plan.programmatic;
  if (interleaved)
    launch_pairing<true>(params, plan, shape, stream);
  else
    launch_pairing<false>(params, plan, shape, stream);
}

}  // namespace astrai::attention
