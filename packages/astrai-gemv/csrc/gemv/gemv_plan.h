// SPDX-License-Identifier: Apache-2.0
// Launch plan of the small-M linear kernels (gemv, swiglu): a pure function of problem and device.
#pragma once

#include <cstdint>

#include "astrai/host/device.h"
#include "gemv/gemv_traits.h"

namespace astrai::gemv {

struct GemvProblem {
  int m;                    // tokens, 1..8
  int n;                    // outputs
  int k;                    // reduction length
  int64_t row_stride;       // elements between weight rows
  uint64_t weight_address;  // only its value modulo 16 matters
  uint64_t x_address;       // likewise
  bool swiglu;              // two weights, all operands 16-byte aligned by contract
  bool static_weights;      // no kernel in flight writes the weights
};

struct GemvPlan {
  RowSource source;
  int parts;          // CTAs of a cluster, each with a part of K of the same rows
  int segments;       // of K beside the tokens in the MMA: 2 for up to 4 of aligned rows
  bool resident;      // all of a CTA's x stays in registers
  int window;         // chunks of K that a warp sums by themselves; any m has the same
  int held;           // windows that registers hold
  int grid;           // CTAs
  int smem_bytes;     // per CTA
  bool programmatic;  // launch with programmatic dependent launch
};

GemvPlan plan_gemv(const GemvProblem& problem, const DeviceInfo& device);

}  // namespace astrai::gemv
