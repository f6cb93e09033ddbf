// SPDX-License-Identifier: Apache-2.0
// Tile constants of the small-M linear kernels, shared by plan and kernel.
#pragma once

namespace astrai::gemv {

// How the kernel reads weight rows; see gemv_kernel.cuh.
enum class RowSource : int { kAligned = 0, kUnaligned = 1, kSwiglu = 2 };

constexpr int kMaxTokens = 8;  // the 8-wide N operand of the MMA
constexpr int kWarps = 8;      // warps of a CTA, each with chunks of K of its own
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 16;  // the M operand of the MMA
constexpr int kChunk = 128;    // elements of K that a warp takes in turn
constexpr int kWindow = 4;     // chunks of x whose products are summed by themselves, at most
constexpr int kSlotK = 64;     // elements of K per ring slot: one 128-byte line of each row
constexpr int kSlotBytes = kTileRows * kSlotK * 2;
constexpr int kTileFloats = kTileRows * kMaxTokens;
constexpr int kClasses = 8;  // kUnaligned: rows apart by a multiple of this start alike

// K of a window of all warps. The registers of a CTA hold one, or two where there are two segments.
constexpr int kWindowK = kWindow * kWarps * kChunk;

static_assert(kChunk == 2 * kSlotK, "a chunk is two ring slots");

// Tiles between two reductions across the warps. Where x does not stay in registers it is loaded once
// per block: M / 64 of the weight traffic.
constexpr int kBlockTiles = 4;

// Bytes in flight bound the bandwidth that an SM can draw, and 48 KB suffice for that; the rest is
// what the next kernel can prefetch while this one drains, for which two CTAs must fit on an SM:
// 228 KB on sm_90 and sm_100. Other parts have 100 KB (sm_86, sm_89, sm_120), and compute_80 PTX may
// run on any of them.
constexpr int stages_for(int image_arch) { return image_arch < 90 || image_arch >= 120 ? 4 : 6; }

constexpr int buffer_bytes(int image_arch) {
  return kWarps * (stages_for(image_arch) * kSlotBytes + 4 * kBlockTiles * kTileFloats);
}

constexpr int kBarrierBytes = 16;  // counts what the CTAs of a cluster send to each other

// Behind the buffers and the barrier, each warp has a word.
constexpr int smem_bytes(int image_arch) {
  return buffer_bytes(image_arch) + kBarrierBytes + 4 * kWarps;
}

constexpr bool fits(int image_arch, int ctas, int smem_per_sm) {
  return ctas * (smem_bytes(image_arch) + 1024) <= smem_per_sm;
}

static_assert(fits(90, 2, 228 * 1024), "the next kernel must fit beside this one");
static_assert(fits(80, 1, 100 * 1024), "all of sm_86, sm_89 and sm_120");

}  // namespace astrai::gemv
