// SPDX-License-Identifier: Apache-2.0
// Warp-level pieces of attention: swizzled bf16 tiles in shared memory, ldmatrix, exp2.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "astrai/device/async_copy.cuh"

namespace astrai::attention {

constexpr float kMinusInfinity = -__builtin_huge_valf();

// A tile has rows of kRowBytes (a power of two from 64 on). The 16-byte piece c of row r sits at
// c ^ key(r), so that 8 rows at one piece, which ldmatrix reads together, lie in 8 different bank
// groups. Rows a multiple of 8 apart have one key.
template <int kRowBytes>
__device__ __forceinline__ constexpr uint32_t swizzle_key(uint32_t row) {
  return kRowBytes >= 128 ? row & 7 : row >> 1 & 3;
}

template <int kRowBytes>
__device__ __forceinline__ constexpr uint32_t tile_offset(uint32_t row, uint32_t piece) {
  return row * kRowBytes + ((piece ^ swizzle_key<kRowBytes>(row)) << 4);
}

// From the offset of piece 0 or 1 to that of the piece `pieces` (even, known at compile time) on.
__device__ __forceinline__ constexpr uint32_t pieces_on(uint32_t offset, int pieces) {
  return (offset ^ ((pieces & 7) << 4)) + (pieces >> 3) * 128;
}

// Four 8x8 matrices of bf16; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem));
}

// 16 bytes, or zeros where not `valid`.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t smem, const void* global, bool valid) {
  cp_async_16(smem, global, valid ? 16 : 0);
}

// 2^x; results below the normal range are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float round_to_bf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

__device__ __forceinline__ void unpack_8(uint4 packed, float (&x)[8]) {
  const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

// Eight numbers of a tile.
__device__ __forceinline__ void load_8(uint32_t smem, float (&x)[8]) {
  unpack_8(ld_shared_16(smem), x);
}

__device__ __forceinline__ void st_shared_4(uint32_t smem, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
}

}  // namespace astrai::attention
