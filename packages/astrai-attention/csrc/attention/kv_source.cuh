// SPDX-License-Identifier: Apache-2.0
// Where K and V of a logical position lie: the policy that lets one attention body serve contiguous and
// paged caches. A source knows lengths and addresses; which queries a CTA takes is not its business.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace astrai::attention {

// Strides are in elements; head_dim has stride 1 and rows start on 16 bytes. K and V share strides.
struct ContigKv {
  const __nv_bfloat16* k;  // [batch, length, kv_heads, head_dim]
  const __nv_bfloat16* v;
  int64_t batch_stride, token_stride, head_stride;
  int length;

#if defined(__CUDACC__)
  __device__ __forceinline__ int kv_len(int) const { return length; }

  // The sum of both is the element offset of a position's row, for both k and v.
  __device__ __forceinline__ int64_t base(int batch, int head) const {
    return batch * batch_stride + head * head_stride;
  }
  __device__ __forceinline__ int64_t row(int /*page*/, int position) const {
    return position * token_stride;
  }
#endif
};

// Page ids past a sequence's last page may be anything: no address made of them is read.
struct PagedKv {
  const __nv_bfloat16*
      k;  // pool: [pages, page_size, kv_heads, head_dim] in any order of the middle two
  const __nv_bfloat16* v;
  int64_t page_stride, token_stride, head_stride;
  const int* page_table;  // [batch, table_stride]
  int64_t table_stride;
  const int* lengths;  // [batch], or [batch + 1] running sums where `ragged`
  bool ragged;
  int page_shift;  // log2 of page_size

#if defined(__CUDACC__)
  __device__ __forceinline__ int kv_len(int batch) const {
    return ragged ? lengths[batch + 1] - lengths[batch] : lengths[batch];
  }

  // The page of a position, for `row`; its id takes a read.
  __device__ __forceinline__ int page(int batch, int position) const {
    return page_table[batch * table_stride + (position >> page_shift)];
  }

  __device__ __forceinline__ int64_t base(int, int head) const { return head * head_stride; }
  __device__ __forceinline__ int64_t row(int page, int position) const {
    return page * page_stride + (position & ((1 << page_shift) - 1)) * token_stride;
  }
#endif
};

}  // namespace astrai::attention
