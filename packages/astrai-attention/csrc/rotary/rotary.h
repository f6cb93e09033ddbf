// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "astrai/host/device.h"

namespace astrai::attention {

// CTAs have up to this many threads.
constexpr int kRotaryThreads = 256;
constexpr int kRotaryMaxHeadDim = 512;

// In elements; the last dimension has stride 1. Packed tokens are one batch.
struct RotaryStrides {
  int64_t batch, seq, head;
};

struct RotaryParams {
  const __nv_bfloat16* x;  // [batch, seq, heads, head_dim]
  const float* cos;        // [batch, seq, head_dim / 2]; batch stride 0 where the batch shares it
  const float* sin;
  __nv_bfloat16* out;  // of x's shape; x itself, or apart from it
  RotaryStrides x_stride, out_stride;
  RotaryStrides cos_stride, sin_stride;  // head: 0
  int tokens;                            // batch * seq
  int seq, heads, head_dim;
};

struct RotaryProblem {
  int64_t tokens;  // batch * seq
  int heads;
  int head_dim;  // a multiple of 16 up to kRotaryMaxHeadDim
  bool interleaved;
};

// A thread takes one vector along head_dim of heads g, g + groups, g + 2 * groups, ... of a token,
// where g is the index of its group.
struct RotaryPlan {
  int heads_per_thread;  // 1, 2 or 4
  int groups;            // heads / heads_per_thread, rounded up
  int block_x;           // vectors of a head: all of them
  int block_y;           // groups
  int block_z;           // tokens
  int grid_x;            // tiles of tokens
  int grid_y;            // tiles of groups
  bool programmatic;     // launch with programmatic dependent launch
};

RotaryPlan plan_rotary(const RotaryProblem& problem, const DeviceInfo& device);

// Launches the planned kernel on `stream` of the current device.
void launch_rotary(const RotaryParams& params, const RotaryPlan& plan, bool interleaved,
                   cudaStream_t stream);

}  // namespace astrai::attention
