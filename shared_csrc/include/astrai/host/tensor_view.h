// SPDX-License-Identifier: Apache-2.0
// A named, checked, non-owning view of a tensor. Every message names the argument, what was expected
// and what came. The device is checked last, so that every other check can be tested on a machine
// without a GPU.
#pragma once

#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "astrai/host/error.h"

namespace astrai {

enum class DType { kBFloat16, kFloat32, kInt32, kUInt8, kBool };

inline DLDataType dl_dtype(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return {kDLBfloat, 16, 1};
    case DType::kFloat32: return {kDLFloat, 32, 1};
    case DType::kInt32: return {kDLInt, 32, 1};
    case DType::kUInt8: return {kDLUInt, 8, 1};
    default: return {kDLBool, 8, 1};
  }
}

inline std::string dtype_name(DLDataType dtype) {
  const std::string bits = std::to_string(int{dtype.bits});
  switch (dtype.code) {
    case kDLInt: return "int" + bits;
    case kDLUInt: return "uint" + bits;
    case kDLFloat: return "float" + bits;
    case kDLBfloat: return "bfloat" + bits;
    case kDLComplex: return "complex" + bits;
    case kDLBool: return "bool";
    default: return concat("a ", bits, "-bit dtype (DLPack code ", int{dtype.code}, ")");
  }
}

class TensorView {
 public:
  TensorView(const char* name, const DLTensor& tensor) : name_(name), tensor_(tensor) {}

  const char* name() const { return name_; }
  int rank() const { return tensor_.ndim; }
  int64_t size(int dim) const { return tensor_.shape[wrap(dim)]; }
  // DLPack lets a compact tensor leave its strides out.
  int64_t stride(int dim) const {
    if (tensor_.strides != nullptr) return tensor_.strides[wrap(dim)];
    int64_t stride = 1;
    for (int i = rank() - 1; i > wrap(dim); --i) stride *= tensor_.shape[i];
    return stride;
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank(); ++i) count *= tensor_.shape[i];
    return count;
  }
  int device_index() const { return tensor_.device.device_id; }
  DLDevice device() const { return tensor_.device; }
  int64_t item_bytes() const { return tensor_.dtype.bits / 8; }

  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(tensor_.data) + tensor_.byte_offset);
  }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data<char>()); }

  std::string shape_text() const {
    std::string text = "[";
    for (int i = 0; i < rank(); ++i) text += (i ? ", " : "") + std::to_string(size(i));
    return text + "]";
  }
  std::string strides_text() const {
    std::string text = "[";
    for (int i = 0; i < rank(); ++i) text += (i ? ", " : "") + std::to_string(stride(i));
    return text + "]";
  }

  const TensorView& expect_dtype(DType dtype) const {
    const DLDataType want = dl_dtype(dtype);
    if (tensor_.dtype.code != want.code || tensor_.dtype.bits != want.bits ||
        tensor_.dtype.lanes != want.lanes)
      throw TypeError(concat(name_, ": expected dtype ", dtype_name(want), ", got ",
                             dtype_name(tensor_.dtype)));
    return *this;
  }

  const TensorView& expect_rank(int low, int high, const char* layout) const {
    if (rank() < low || rank() > high)
      throw ValueError(
          concat(name_, ": expected shape ", layout, ", got ", rank(), "-D ", shape_text()));
    return *this;
  }

  const TensorView& expect_size(int dim, int64_t want, const char* meaning) const {
    if (size(dim) != want)
      throw ValueError(concat(name_, ": expected size ", want, " (", meaning, ") in dimension ",
                              wrap(dim), ", got shape ", shape_text()));
    return *this;
  }

  // As another tensor has them; a dimension of one element may have any.
  const TensorView& expect_strides_of(const TensorView& other) const {
    for (int i = 0; i < rank(); ++i)
      if (size(i) > 1 && stride(i) != other.stride(i))
        throw ValueError(concat(name_, ": expected the strides of ", other.name_, ", ",
                                other.strides_text(), ", got ", strides_text()));
    return *this;
  }

  const TensorView& expect_size_in(int dim, int64_t low, int64_t high, const char* meaning) const {
    if (size(dim) < low || size(dim) > high)
      throw ValueError(concat(name_, ": expected ", meaning, " in ", low, "..", high, ", got ",
                              size(dim), " (shape ", shape_text(), ")"));
    return *this;
  }

  const TensorView& expect_contiguous() const {
    int64_t want = 1;
    for (int i = rank() - 1; i >= 0; --i) {
      if (size(i) != 1 && stride(i) != want)
        throw ValueError(concat(name_, ": expected a contiguous tensor, got shape ", shape_text(),
                                " with stride ", stride(i), " in dimension ", i));
      want *= size(i);
    }
    return *this;
  }

  // Rows may be apart by more than their length (a slice of a wider matrix), never overlap.
  const TensorView& expect_rows_contiguous() const {
    const bool inner = size(-1) == 1 || stride(-1) == 1;
    const bool outer = size(-2) == 1 || stride(-2) >= size(-1);
    if (!inner || !outer)
      throw ValueError(concat(name_, ": expected contiguous rows (stride 1 in the last dimension, ",
                              "at least ", size(-1), " in the one before), got strides [",
                              stride(-2), ", ", stride(-1), "]"));
    return *this;
  }

  // For kernels that move 16 bytes at a time. Strides of leading dimensions are otherwise free, 0
  // included.
  const TensorView& expect_aligned_rows() const {
    if (numel() == 0) return *this;
    bool aligned = address() % 16 == 0;
    for (int i = 0; i < rank() - 1; ++i)
      if (size(i) > 1 && stride(i) * item_bytes() % 16 != 0) aligned = false;
    if (size(-1) > 1 && stride(-1) != 1)
      throw ValueError(
          concat(name_, ": expected stride 1 in the last dimension, got strides ", strides_text()));
    if (!aligned)
      throw ValueError(concat(name_, ": expected rows that start on 16 bytes, got an offset of ",
                              address() % 16, " bytes and strides ", strides_text(),
                              " in elements of ", item_bytes(), " bytes"));
    return *this;
  }

  // What is written may hold no element twice, as an expanded tensor does.
  const TensorView& expect_distinct_elements() const {
    expect_rank(0, kMaxRank, "of at most 8 dimensions");
    int order[kMaxRank], count = 0;
    for (int i = 0; i < rank(); ++i)
      if (size(i) > 1) order[count++] = i;
    std::sort(order, order + count, [this](int a, int b) { return stride(a) < stride(b); });
    int64_t reach = 1;
    for (int i = 0; numel() != 0 && i < count; ++i) {
      if (stride(order[i]) < reach)
        throw ValueError(concat(name_, ": expected elements that share no memory, got shape ",
                                shape_text(), " with strides ", strides_text()));
      reach += (size(order[i]) - 1) * stride(order[i]);
    }
    return *this;
  }

  const TensorView& expect_cuda() const {
    if (tensor_.device.device_type != kDLCUDA)
      throw ValueError(concat(name_, ": expected a CUDA tensor, got one on ",
                              tensor_.device.device_type == kDLCPU ? "the CPU" : "another device"));
    if (numel() != 0 && data<char>() == nullptr)
      throw ValueError(concat(name_, ": expected a tensor with storage, got one without"));
    return *this;
  }

  const TensorView& expect_same_device(const TensorView& other) const {
    if (device_index() != other.device_index())
      throw ValueError(concat(name_, ": expected the device of ", other.name(),
                              " (cuda:", other.device_index(), "), got cuda:", device_index()));
    return *this;
  }

  // A kernel may read the gaps between the rows of a strided tensor, so they count as its memory.
  const TensorView& expect_disjoint(const TensorView& other) const {
    if (overlaps(other))
      throw ValueError(concat(name_,
                              ": expected memory of its own, got some between the first and ",
                              "the last element of ", other.name()));
    return *this;
  }

  // For kernels that may work in place: every element at its own address, or all memory apart.
  const TensorView& expect_same_or_disjoint(const TensorView& other) const {
    bool same = rank() == other.rank() && address() == other.address();
    for (int i = 0; same && i < rank(); ++i)
      same = size(i) == other.size(i) && (size(i) == 1 || stride(i) == other.stride(i));
    if (!same && overlaps(other))
      throw ValueError(concat(name_, ": expected ", other.name(),
                              " itself or memory of its own, got memory partly shared with ",
                              other.name()));
    return *this;
  }

 private:
  static constexpr int kMaxRank = 8;

  // By extent: a tensor that lies in the gaps of another counts as overlapping.
  bool overlaps(const TensorView& other) const {
    if (numel() == 0 || other.numel() == 0) return false;
    return address() < other.end_address() && other.address() < end_address();
  }
  int wrap(int dim) const { return dim < 0 ? dim + rank() : dim; }
  uintptr_t end_address() const {
    int64_t last = 0;
    for (int i = 0; i < rank(); ++i) {
      if (size(i) == 0) return address();
      last += (size(i) - 1) * stride(i);
    }
    return address() + static_cast<uintptr_t>((last + 1) * item_bytes());
  }

  const char* name_;
  DLTensor tensor_;
};

// The last of an op's checks: what comes before needs no GPU. Null stands for an argument that is not
// given.
inline void expect_one_gpu(const TensorView& x, std::initializer_list<const TensorView*> others) {
  x.expect_cuda();
  for (const TensorView* other : others)
    if (other != nullptr) other->expect_cuda().expect_same_device(x);
}

// As `expect_one_gpu` takes it.
inline const TensorView* address(const std::optional<TensorView>& view) {
  return view ? &*view : nullptr;
}

}  // namespace astrai
