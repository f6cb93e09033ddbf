// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <optional>

#include "astrai/host/torch_exchange.h"
#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "family.h"
#include "rotary/rotary.h"

namespace py = pybind11;

namespace {

using astrai::concat;
using astrai::DType;
using astrai::TensorView;
using astrai::TorchExchange;
using astrai::ValueError;
namespace attention = astrai::attention;

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxHeads = 65535;

using Bf16 = __nv_bfloat16;

// Per-token heads: [batch, seq, heads, head_dim], or packed [tokens, heads, head_dim] as one batch.
struct Heads {
  explicit Heads(const TensorView& x) {
    x.expect_dtype(DType::kBFloat16)
        .expect_rank(3, 4, "[tokens, heads, head_dim] or [batch, seq, heads, head_dim]");
    packed = x.rank() == 3;
    if (!packed) x.expect_size_in(0, 0, kMaxTokens, "batch");
    x.expect_size_in(-3, 0, kMaxTokens, packed ? "tokens" : "seq")
        .expect_size_in(-2, 0, kMaxHeads, "heads");
    batch = packed ? 1 : x.size(0);
    seq = x.size(-3);
    if (batch * seq > kMaxTokens)
      throw ValueError(concat(x.name(), ": expected at most ", kMaxTokens, " tokens, got ",
                              batch * seq, " (shape ", x.shape_text(), ")"));
    heads = static_cast<int>(x.size(-2));
    head_dim = x.size(-1);
  }
  bool packed;
  int64_t batch, seq;
  int heads;
  int64_t head_dim;
};

attention::RotaryStrides head_strides(const TensorView& x) {
  return {x.rank() == 4 ? x.stride(0) : 0, x.stride(-3), x.stride(-2)};
}

attention::RotaryStrides angle_strides(const TensorView& table) {
  return {table.rank() == 3 ? table.stride(0) : 0, table.stride(-2), 0};
}

void check_angles(const TensorView& table, const Heads& x) {
  table.expect_dtype(DType::kFloat32)
      .expect_rank(
          2, x.packed ? 2 : 3,
          x.packed ? "[tokens, head_dim / 2]" : "[seq, head_dim / 2] or [batch, seq, head_dim / 2]")
      .expect_size(-1, x.head_dim / 2, "half of head_dim of x")
      .expect_size(-2, x.seq, x.packed ? "tokens of x" : "seq of x");
  if (table.rank() == 3) table.expect_size(0, x.batch, "batch of x");
  table.expect_aligned_rows();
}

py::object rotary_emb(py::handle x_, py::handle cos_, py::handle sin_, py::handle interleaved_,
                      py::handle out_) {
  const TorchExchange& torch = TorchExchange::get();
  const bool interleaved = astrai::as_bool("interleaved", interleaved_);
  const TensorView x = torch.view("x", x_);
  const TensorView cos = torch.view("cos", cos_);
  const TensorView sin = torch.view("sin", sin_);
  const Heads shape(x);
  x.expect_size_in(-1, 16, attention::kRotaryMaxHeadDim, "head_dim");
  if (shape.head_dim % 16 != 0)
    throw ValueError(concat("x: expected head_dim divisible by 16, got ", shape.head_dim));
  x.expect_aligned_rows();
  check_angles(cos, shape);
  check_angles(sin, shape);
  std::optional<TensorView> out = attention::check_out(out_, x);
  if (out) out->expect_same_or_disjoint(x).expect_disjoint(cos).expect_disjoint(sin);
  torch.refuse_grad("rotary_emb", {{"x", x_}, {"cos", cos_}, {"sin", sin_}, {"out", out_}});
  astrai::expect_one_gpu(x, {&cos, &sin, astrai::address(out)});

  const py::object result = out ? py::reinterpret_borrow<py::object>(out_) : torch.empty_like(x_);
  if (x.numel() == 0) return result;
  if (!out) out.emplace(torch.view("out", result));

  attention::RotaryParams params{};
  params.x = x.data<Bf16>();
  params.cos = cos.data<float>();
  params.sin = sin.data<float>();
  params.out = out->data<Bf16>();
  params.x_stride = head_strides(x);
  params.out_stride = head_strides(*out);
  params.cos_stride = angle_strides(cos);
  params.sin_stride = angle_strides(sin);
  params.tokens = static_cast<int>(shape.batch * shape.seq);
  params.seq = static_cast<int>(shape.seq);
  params.heads = shape.heads;
  params.head_dim = static_cast<int>(shape.head_dim);
  const int device = x.device_index();
  const attention::RotaryPlan plan = attention::plan_rotary(
      {params.tokens, params.heads, params.head_dim, interleaved}, attention::device_info(device));
  astrai::DeviceGuard guard(device);
  attention::launch_rotary(params, plan, interleaved, torch.current_stream(x.device()));
  if (!out_.is_none()) torch.mark_written(out_);
  return result;
}

py::dict plan_rotary(int64_t tokens, int heads, int head_dim, bool interleaved,
                     const astrai::DeviceInfo& device) {
  const attention::RotaryPlan plan =
      attention::plan_rotary({tokens, heads, head_dim, interleaved}, device);
  py::dict result;
  result["heads_per_thread"] = plan.heads_per_thread;
  result["groups"] = plan.groups;
  result["block"] = py::make_tuple(plan.block_x, plan.block_y, plan.block_z);
  result["grid"] = py::make_tuple(plan.grid_x, plan.grid_y);
  result["programmatic"] = plan.programmatic;
  return result;
}

}  // namespace

void bind_rotary(py::module_& m) {
  m.def("plan_rotary", &plan_rotary, py::kw_only(), py::arg("tokens"), py::arg("heads"),
        py::arg("head_dim"), py::arg("interleaved"), py::arg("device"));
  m.def("rotary_emb", &rotary_emb, py::arg("x"), py::arg("cos"), py::arg("sin"),
        py::arg("interleaved"), py::arg("out"));
}
