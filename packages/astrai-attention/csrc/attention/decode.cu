// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "astrai/host/launch.h"
#include "attention/arrivals.h"
#include "attention/decode_kernel.cuh"
#include "attention/decode_mma.cuh"
#include "attention/decode_scalar.cuh"

namespace astrai::attention {

namespace {

template <int kHeadDim>
using Warp = std::conditional_t<kMma, MmaWarp<kHeadDim>, ScalarWarp<kHeadDim>>;

template <int kHeadDim, int kWarps, class Kv>
void launch_instance(const DecodeParams<Kv>& params, const DecodePlan& plan, int device,
                     cudaStream_t stream) {
  auto* kernel = decode_kernel<Warp<kHeadDim>, kWarps, Kv>;
  static SmemOptIn opt_in;
  opt_in(kernel, plan.smem_bytes, device, "attn_decode");
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(plan.grid));
  shape.block = dim3(32 * kWarps);
  shape.smem_bytes = plan.smem_bytes;
  shape.cluster = plan.parts;
  shape.programmatic = plan.programmatic;
  launch(kernel, shape, stream, "attn_decode", params);
  if (plan.splits == 1 || params.arrivals != nullptr) return;
  shape.grid = dim3(static_cast<unsigned>(plan.merge_grid));
  shape.block = dim3(decode_merge_threads(kHeadDim));
  shape.smem_bytes = 0;
  launch(merge_kernel<kHeadDim, Kv>, shape, stream, "attn_decode", params);
}

// The numbers of warps that a plan may ask for.
template <int kHeadDim, class Kv>
void launch_warps(const DecodeParams<Kv>& params, const DecodePlan& plan, int device,
                  cudaStream_t stream) {
  if constexpr (kHeadDim == 256) {
    if (plan.warps == 2) return launch_instance<256, 2>(params, plan, device, stream);
  } else {
    if (plan.warps == 8) return launch_instance<kHeadDim, 8>(params, plan, device, stream);
  }
  launch_instance<kHeadDim, 4>(params, plan, device, stream);
}

template <class Kv>
void launch_head_dim(DecodeParams<Kv> params, const DecodePlan& plan, int head_dim, int device,
                     cudaStream_t stream) {
  if (plan.merges_inside) params.arrivals = arrivals_for(device, stream);
  switch (head_dim) {
    case 32: return launch_warps<32>(params, plan, device, stream);
    case 64: return launch_warps<64>(params, plan, device, stream);
    case 128: return launch_warps<128>(params, plan, device, stream);
    default: return launch_warps<256>(params, plan, device, stream);
  }
}

}  // namespace

void launch_decode(const DecodeParams<ContigKv>& params, const DecodePlan& plan, int head_dim,
                   int device, cudaStream_t stream) {
  launch_head_dim(params, plan, head_dim, device, stream);
}

void launch_decode(const DecodeParams<PagedKv>& params, const DecodePlan& plan, int head_dim,
                   int device, cudaStream_t stream) {
  launch_head_dim(params, plan, head_dim, device, stream);
}

}  // namespace astrai::attention
