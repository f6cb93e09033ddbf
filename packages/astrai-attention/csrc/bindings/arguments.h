// SPDX-License-Identifier: Apache-2.0
// Checks that the ops share, and the form of what they return.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <initializer_list>
#include <optional>

#include "astrai/host/arguments.h"
#include "astrai/host/torch_exchange.h"

namespace astrai::attention {

namespace py = pybind11;

inline int64_t as_int(const char* name, py::handle value) {
  if (!PyLong_Check(value.ptr()) || PyBool_Check(value.ptr()))
    throw TypeError(concat(name, ": expected an int, got ", Py_TYPE(value.ptr())->tp_name));
  const long long number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw ValueError(concat(name, ": expected an int of 64 bits, got a larger one"));
  }
  return number;
}

// Times log2(e); by default 1 / sqrt(head_dim).
inline float scale_log2(py::handle value, int64_t head_dim) {
  constexpr double kLog2E = 1.4426950408889634;
  if (value.is_none()) return static_cast<float>(kLog2E / std::sqrt(static_cast<double>(head_dim)));
  const double number = as_number("scale", value);
  const double scale = number * kLog2E;
  // Neither the scale nor its inverse may leave the normal range of fp32.
  if (!(scale >= 1e-30 && scale <= 1e30))
    throw ValueError(concat("scale: expected a number in 1e-30..1e30, got ", number));
  return static_cast<float>(scale);
}

inline int64_t as_page_size(py::handle value) {
  constexpr int64_t kMax = 256;
  const int64_t page_size = as_int("page_size", value);
  if (page_size < 1 || page_size > kMax || (page_size & (page_size - 1)) != 0)
    throw ValueError(
        concat("page_size: expected a power of two in 1..", kMax, ", got ", page_size));
  return page_size;
}

// All kernels are made for these.
inline void check_head_dim(const TensorView& q) {
  const int64_t head_dim = q.size(-1);
  if (head_dim != 32 && head_dim != 64 && head_dim != 128 && head_dim != 256)
    throw ValueError(concat(q.name(), ": expected head_dim 32, 64, 128 or 256, got ", head_dim));
}

// K and V are addressed with the same offsets.
inline void check_v(const TensorView& v, const TensorView& k, const char* layout) {
  v.expect_dtype(DType::kBFloat16).expect_rank(4, 4, layout);
  for (int i = 0; i < 4; ++i) v.expect_size(i, k.size(i), concat("that of ", k.name()).c_str());
  v.expect_aligned_rows().expect_strides_of(k);
}

// An `out` that is given, shaped like `like`, in any layout of rows.
inline std::optional<TensorView> check_out(py::handle object, const TensorView& like) {
  if (object.is_none()) return std::nullopt;
  std::optional<TensorView> out(TorchExchange::get().view("out", object));
  out->expect_dtype(DType::kBFloat16)
      .expect_rank(like.rank(), like.rank(), concat("of ", like.name()).c_str());
  for (int i = 0; i < like.rank(); ++i)
    out->expect_size(i, like.size(i), concat("that of ", like.name()).c_str());
  out->expect_aligned_rows().expect_distinct_elements();
  return out;
}

// An `lse` that is given: a row of numbers of the queries for each head.
inline std::optional<TensorView> check_lse(py::handle object, std::initializer_list<int64_t> shape,
                                           const char* layout) {
  if (object.is_none()) return std::nullopt;
  std::optional<TensorView> lse(TorchExchange::get().view("lse", object));
  const int rank = static_cast<int>(shape.size());
  lse->expect_dtype(DType::kFloat32).expect_rank(rank, rank, layout);
  for (int i = 0; i < rank; ++i) lse->expect_size(i, shape.begin()[i], layout);
  lse->expect_contiguous();
  return lse;
}

// What an op writes has memory of its own, apart from what it reads. Null stands for an argument that is
// not given.
inline void expect_apart(std::initializer_list<const TensorView*> written,
                         std::initializer_list<const TensorView*> read) {
  for (auto x = written.begin(); x != written.end(); ++x) {
    if (*x == nullptr) continue;
    for (const TensorView* input : read)
      if (input != nullptr) (*x)->expect_disjoint(*input);
    for (auto other = written.begin(); other != x; ++other)
      if (*other != nullptr) (*x)->expect_disjoint(**other);
  }
}

// `result`, or it and `lse`.
inline py::object answer(const py::object& result, const py::object& lse) {
  if (lse.is_none()) return result;
  return py::make_tuple(result, lse);
}

}  // namespace astrai::attention
