// SPDX-License-Identifier: Apache-2.0
#include "astrai/host/launch.h"
#include "attention/prefill_kernel.cuh"
#include "attention/prefill_scalar_kernel.cuh"

namespace astrai::attention {

namespace {

template <int kHeadDim, bool kMasked, class Schedule, class Kv>
constexpr auto* body() {
  if constexpr (kMma)
    return prefill_kernel<kHeadDim, Schedule, Kv, kMasked>;
  else
    return prefill_scalar_kernel<kHeadDim, Schedule, Kv, kMasked>;
}

template <int kHeadDim, bool kMasked, class Schedule, class Kv>
void launch_instance(const PrefillParams<Schedule, Kv>& params, const PrefillPlan& plan, int device,
                     cudaStream_t stream) {
  constexpr const char* kWhat = std::is_same_v<Kv, PagedKv> ? "attn_paged_prefill" : "attn_prefill";
  auto* kernel = body<kHeadDim, kMasked, Schedule, Kv>();
  static SmemOptIn opt_in;
  opt_in(kernel, plan.smem_bytes, device, kWhat);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(plan.grid));
  shape.block = dim3(kPrefillThreads);
  shape.smem_bytes = plan.smem_bytes;
  shape.programmatic = plan.programmatic;
  launch(kernel, shape, stream, kWhat, params);
}

template <bool kMasked, class Params>
void launch_head_dim(const Params& params, const PrefillPlan& plan, int head_dim, int device,
                     cudaStream_t stream) {
  switch (head_dim) {
    case 32: return launch_instance<32, kMasked>(params, plan, device, stream);
    case 64: return launch_instance<64, kMasked>(params, plan, device, stream);
    case 128: return launch_instance<128, kMasked>(params, plan, device, stream);
    default: return launch_instance<256, kMasked>(params, plan, device, stream);
  }
}

}  // namespace

void launch_prefill(const DensePrefillParams& params, const PrefillPlan& plan, int head_dim,
                    int device, cudaStream_t stream) {
  if (params.mask.data != nullptr)
    launch_head_dim<true>(params, plan, head_dim, device, stream);
  else
    launch_head_dim<false>(params, plan, head_dim, device, stream);
}

void launch_prefill(const PackedPrefillParams& params, const PrefillPlan& plan, int head_dim,
                    int device, cudaStream_t stream) {
  launch_head_dim<false>(params, plan, head_dim, device, stream);
}

}  // namespace astrai::attention
