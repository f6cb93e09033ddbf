// SPDX-License-Identifier: Apache-2.0
// Warp matrix multiply-accumulate, bf16 in, fp32 out (sm_80 and newer).
#pragma once

#include <cstdint>

namespace astrai {

// d[16, 8] += a[16, 16] * b[16, 8]. With g = lane / 4 and t = lane % 4, a lane holds
//   a: (g, 2t..) (g + 8, 2t..) (g, 2t + 8..) (g + 8, 2t + 8..), two k each;  b: (2t.., g) (2t + 8.., g);
//   d: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1).
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace astrai
