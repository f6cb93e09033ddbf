// SPDX-License-Identifier: Apache-2.0
// Fused residual add and RMSNorm for M = 1..8 tokens:
//   sum = bf16(x + residual);  out = bf16(weight * bf16(sum * rsqrt(mean(sum^2) + eps))).
//
// Algorithm. A CTA takes one token. Its first kCached vectors of `sum` stay in registers; longer rows
// read their own stores back, which the same thread made. The square sum is reduced by a fixed tree.
//
// Grid. M CTAs of up to 1,024 threads: at 8 tokens the op is all latency (2 loads, a reduction, a
// store), and spreading a token over SMs would add a barrier that costs more than it saves.
//
// Shared memory. 32 floats. Floor. M * hidden * 8 bytes: nothing; the launch is the cost.
#pragma once

#include "astrai/device/pdl.cuh"
#include "norm/add_rms_norm.h"

namespace astrai::gemv {

template <int kVector>
struct alignas(2 * kVector) Bf16Vector {
  __nv_bfloat16 e[kVector];
};

__device__ __forceinline__ float block_sum(float value, float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = static_cast<int>(threadIdx.x % 32) < warps ? scratch[threadIdx.x % 32] : 0.0f;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

template <int kVector>
__global__ void __launch_bounds__(1024)
    add_rms_norm_kernel(const __grid_constant__ AddRmsNormParams p) {
  using Vector = Bf16Vector<kVector>;
  constexpr int kCached = kVector == 8 ? 1 : 4;
  __shared__ float scratch[32];

  pdl_launch_dependents();
  const int vectors = p.hidden / kVector;
  const int64_t row = int64_t{blockIdx.x} * vectors;
  const auto* x = reinterpret_cast<const Vector*>(p.x) + row;
  const auto* residual = reinterpret_cast<const Vector*>(p.residual) + row;
  const auto* weight = reinterpret_cast<const Vector*>(p.weight);
  auto* out = reinterpret_cast<Vector*>(p.out) + row;
  auto* sum = reinterpret_cast<Vector*>(p.sum) + row;

  Vector w[kCached], h[kCached];
  const auto load_weight = [&] {
#pragma unroll
    for (int i = 0; i < kCached; ++i) {
      const int v = threadIdx.x + i * blockDim.x;
      if (v < vectors) w[i] = weight[v];
    }
  };
  if (p.static_weights) load_weight();
  pdl_wait();
  if (!p.static_weights) load_weight();

  float squares = 0.0f;
  const auto add = [&](int v) {
    Vector s = x[v];
    const Vector r = residual[v];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      s.e[i] = __float2bfloat16_rn(__bfloat162float(s.e[i]) + __bfloat162float(r.e[i]));
      squares += __bfloat162float(s.e[i]) * __bfloat162float(s.e[i]);
    }
    sum[v] = s;
    return s;
  };
#pragma unroll
  for (int i = 0; i < kCached; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v < vectors) h[i] = add(v);
  }
  for (int v = threadIdx.x + kCached * blockDim.x; v < vectors; v += blockDim.x) add(v);

  const float scale = rsqrtf(block_sum(squares, scratch) / static_cast<float>(p.hidden) + p.eps);
  const auto normalize = [&](int v, const Vector& s, const Vector& g) {
    Vector y;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const __nv_bfloat16 unit = __float2bfloat16_rn(__bfloat162float(s.e[i]) * scale);
      y.e[i] = __float2bfloat16_rn(__bfloat162float(g.e[i]) * __bfloat162float(unit));
    }
    out[v] = y;
  };
#pragma unroll
  for (int i = 0; i < kCached; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v < vectors) normalize(v, h[i], w[i]);
  }
  for (int v = threadIdx.x + kCached * blockDim.x; v < vectors; v += blockDim.x)
    normalize(v, sum[v], weight[v]);
}

}  // namespace astrai::gemv
