// SPDX-License-Identifier: Apache-2.0
// The only file that sees Python: checks arguments, allocates the output, plans, launches.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <optional>

#include "astrai/host/arguments.h"
#include "astrai/host/bind_device.h"
#include "astrai/host/torch_exchange.h"
#include "gemv/gemv.h"
#include "gemv/gemv_traits.h"
#include "norm/add_rms_norm.h"

namespace py = pybind11;

namespace {

using astrai::concat;
using astrai::DType;
using astrai::TensorView;
using astrai::TorchExchange;
using astrai::ValueError;
namespace gemv = astrai::gemv;

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max() - 64;
// The kernels index x, and bytes of a row, with 32 bits.
constexpr int64_t kMaxK = int64_t{1} << 27;

using Bf16 = __nv_bfloat16;

// x as M tokens: [K] or [M, K].
struct Tokens {
  explicit Tokens(const TensorView& x) {
    x.expect_dtype(DType::kBFloat16).expect_rank(1, 2, "[K] or [M, K]");
    if (x.rank() == 2) x.expect_size_in(0, 1, gemv::kMaxTokens, "M");
    x.expect_size_in(-1, 1, kMaxK, "K").expect_contiguous();
    m = x.rank() == 2 ? static_cast<int>(x.size(0)) : 1;
    k = static_cast<int>(x.size(-1));
  }
  int m, k;
};

void check_weight(const TensorView& weight, int k) {
  weight.expect_dtype(DType::kBFloat16)
      .expect_rank(2, 2, "[N, K]")
      .expect_size_in(0, 1, kMaxRows, "N")
      .expect_size(1, k, "K of x")
      .expect_rows_contiguous();
}

// One row may claim any stride; addresses past it are formed, though never read.
int64_t row_stride(const TensorView& weight) {
  return weight.size(0) == 1 ? weight.size(1) : weight.stride(0);
}

// The caller's `out`, or a fresh one once every check has passed.
class Output {
 public:
  Output(py::handle out, py::handle x_object, const TensorView& x, int64_t n)
      : out_(out), x_object_(x_object), x_(x), n_(n) {
    if (out.is_none()) return;
    view_.emplace(TorchExchange::get().view("out", out));
    view_->expect_dtype(DType::kBFloat16).expect_rank(x.rank(), x.rank(), "of x with N for K");
    if (x.rank() == 2) view_->expect_size(0, x.size(0), "M of x");
    view_->expect_size(-1, n, "N").expect_contiguous();
  }

  const TensorView* view() const { return astrai::address(view_); }

  void expect_disjoint(std::initializer_list<const TensorView*> inputs) const {
    if (!view_) return;
    for (const TensorView* input : inputs)
      if (input != nullptr) view_->expect_disjoint(*input);
  }

  Bf16* allocate() {
    const TorchExchange& torch = TorchExchange::get();
    if (!view_) {
      made_ = n_ == x_.size(-1) ? torch.empty_like(x_object_)
              : x_.rank() == 1  ? torch.new_empty(x_object_, {n_})
                                : torch.new_empty(x_object_, {x_.size(0), n_});
      view_.emplace(torch.view("out", made_));
    }
    return view_->data<Bf16>();
  }

  // To be called after the launch.
  py::object take() {
    if (made_) return std::move(made_);
    TorchExchange::get().mark_written(out_);
    return py::reinterpret_borrow<py::object>(out_);
  }

 private:
  py::handle out_;
  py::handle x_object_;
  const TensorView& x_;
  int64_t n_;
  std::optional<TensorView> view_;
  py::object made_;
};

// The kernel of swiglu where there is a `gate`, else that of gemv.
py::object run_linear(const Tokens& tokens, const TensorView& x, const TensorView& weight,
                      const TensorView* gate, const TensorView* bias, Output& out,
                      bool static_weights) {
  const int device = x.device_index();
  gemv::GemvParams params{};
  params.x = x.data<Bf16>();
  params.weight = weight.data<Bf16>();
  params.row_stride = row_stride(weight);
  if (gate != nullptr) {
    params.gate = gate->data<Bf16>();
    params.gate_stride = row_stride(*gate);
  }
  if (bias != nullptr) params.bias = bias->data<Bf16>();
  params.m = tokens.m;
  params.n = static_cast<int>(weight.size(0));
  params.k = tokens.k;
  params.static_weights = static_weights;
  const gemv::GemvPlan plan =
      gemv::plan_gemv({params.m, params.n, params.k, params.row_stride, weight.address(),
                       x.address(), /*swiglu=*/gate != nullptr, static_weights},
                      gemv::device_info(device));
  params.window = plan.window;
  params.parts = plan.parts;
  params.out = out.allocate();
  astrai::DeviceGuard guard(device);
  const auto launch = gate != nullptr ? gemv::launch_swiglu : gemv::launch_gemv;
  launch(params, plan, device, TorchExchange::get().current_stream(x.device()));
  return out.take();
}

py::object bf16_gemv(py::handle x_, py::handle weight_, py::handle bias_, py::handle out_,
                     py::handle static_) {
  const TorchExchange& torch = TorchExchange::get();
  const bool static_weights = astrai::as_bool("static_weights", static_);
  const TensorView x = torch.view("x", x_);
  const TensorView weight = torch.view("weight", weight_);
  const Tokens tokens(x);
  check_weight(weight, tokens.k);
  const int64_t n = weight.size(0);
  std::optional<TensorView> bias;
  if (!bias_.is_none()) {
    bias.emplace(torch.view("bias", bias_));
    bias->expect_dtype(DType::kBFloat16)
        .expect_rank(1, 1, "[N]")
        .expect_size(0, n, "N of weight")
        .expect_contiguous();
  }
  Output out(out_, x_, x, n);
  const TensorView* const bias_view = astrai::address(bias);
  out.expect_disjoint({&x, &weight, bias_view});
  torch.refuse_grad("bf16_gemv", {{"x", x_}, {"weight", weight_}, {"bias", bias_}, {"out", out_}});
  astrai::expect_one_gpu(x, {&weight, bias_view, out.view()});
  return run_linear(tokens, x, weight, nullptr, bias_view, out, static_weights);
}

py::object bf16_swiglu(py::handle x_, py::handle up_, py::handle gate_, py::handle out_,
                       py::handle static_) {
  const TorchExchange& torch = TorchExchange::get();
  const bool static_weights = astrai::as_bool("static_weights", static_);
  const TensorView x = torch.view("x", x_);
  const TensorView up = torch.view("up_weight", up_);
  const TensorView gate = torch.view("gate_weight", gate_);
  const Tokens tokens(x);
  if (tokens.k % 8 != 0) throw ValueError(concat("x: expected K divisible by 8, got ", tokens.k));
  check_weight(up, tokens.k);
  check_weight(gate, tokens.k);
  gate.expect_size(0, up.size(0), "N of up_weight");
  x.expect_aligned_rows();
  up.expect_aligned_rows();
  gate.expect_aligned_rows();
  Output out(out_, x_, x, up.size(0));
  out.expect_disjoint({&x, &up, &gate});
  torch.refuse_grad("bf16_swiglu",
                    {{"x", x_}, {"up_weight", up_}, {"gate_weight", gate_}, {"out", out_}});
  astrai::expect_one_gpu(x, {&up, &gate, out.view()});
  return run_linear(tokens, x, up, &gate, nullptr, out, static_weights);
}

py::tuple add_rms_norm(py::handle x_, py::handle residual_, py::handle weight_, py::handle eps_,
                       py::handle static_) {
  const TorchExchange& torch = TorchExchange::get();
  const bool static_weights = astrai::as_bool("static_weights", static_);
  const double eps = astrai::as_number("eps", eps_);
  const TensorView x = torch.view("x", x_);
  const TensorView residual = torch.view("residual", residual_);
  const TensorView weight = torch.view("weight", weight_);
  const Tokens tokens(x);
  residual.expect_dtype(DType::kBFloat16).expect_rank(x.rank(), x.rank(), "of x");
  for (int i = 0; i < x.rank(); ++i) residual.expect_size(i, x.size(i), "that of x");
  residual.expect_contiguous();
  weight.expect_dtype(DType::kBFloat16)
      .expect_rank(1, 1, "[K]")
      .expect_size(0, tokens.k, "K of x")
      .expect_contiguous();
  if (!(eps >= 0.0) || std::isinf(eps))
    throw ValueError(concat("eps: expected a finite number of at least 0, got ", eps));
  torch.refuse_grad("add_rms_norm", {{"x", x_}, {"residual", residual_}, {"weight", weight_}});
  astrai::expect_one_gpu(x, {&residual, &weight});

  const int device = x.device_index();
  gemv::AddRmsNormParams params{};
  params.x = x.data<Bf16>();
  params.residual = residual.data<Bf16>();
  params.weight = weight.data<Bf16>();
  params.m = tokens.m;
  params.hidden = tokens.k;
  params.eps = static_cast<float>(eps);
  params.static_weights = static_weights;
  const bool aligned = (x.address() | residual.address() | weight.address()) % 16 == 0;
  const gemv::AddRmsNormPlan plan =
      gemv::plan_add_rms_norm(tokens.k, aligned, gemv::device_info(device));
  Output out(py::none(), x_, x, tokens.k);
  Output sum(py::none(), x_, x, tokens.k);
  params.out = out.allocate();
  params.sum = sum.allocate();
  astrai::DeviceGuard guard(device);
  gemv::launch_add_rms_norm(params, plan, torch.current_stream(x.device()));
  return py::make_tuple(out.take(), sum.take());
}

py::dict plan_dict(int m, int n, int k, int64_t row_stride, uint64_t weight_address,
                   uint64_t x_address, bool swiglu, bool static_weights,
                   const astrai::DeviceInfo& device) {
  const gemv::GemvPlan plan = gemv::plan_gemv(
      {m, n, k, row_stride, weight_address, x_address, swiglu, static_weights}, device);
  static const char* const kSources[] = {"aligned", "unaligned", "swiglu"};
  py::dict result;
  result["source"] = kSources[static_cast<int>(plan.source)];
  result["parts"] = plan.parts;
  result["segments"] = plan.segments;
  result["resident"] = plan.resident;
  result["window"] = plan.window;
  result["held"] = plan.held;
  result["grid"] = plan.grid;
  result["smem_bytes"] = plan.smem_bytes;
  result["programmatic"] = plan.programmatic;
  return result;
}

}  // namespace

PYBIND11_MODULE(_gemv, m) {
  astrai::register_errors();
  astrai::bind_device_info(m);
  m.def("device_info", [](int device) { return gemv::device_info(device); }, py::arg("device"));
  m.def("plan_gemv", &plan_dict, py::kw_only(), py::arg("m"), py::arg("n"), py::arg("k"),
        py::arg("row_stride"), py::arg("weight_address"), py::arg("x_address"), py::arg("swiglu"),
        py::arg("static_weights"), py::arg("device"));
  m.def(
      "plan_add_rms_norm",
      [](int hidden, bool aligned, const astrai::DeviceInfo& device) {
        const gemv::AddRmsNormPlan plan = gemv::plan_add_rms_norm(hidden, aligned, device);
        py::dict result;
        result["vector"] = plan.vector;
        result["threads"] = plan.threads;
        result["programmatic"] = plan.programmatic;
        return result;
      },
      py::kw_only(), py::arg("hidden"), py::arg("aligned"), py::arg("device"));
  m.def("bf16_gemv", &bf16_gemv, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"),
        py::arg("static_weights"));
  m.def("bf16_swiglu", &bf16_swiglu, py::arg("x"), py::arg("up_weight"), py::arg("gate_weight"),
        py::arg("out"), py::arg("static_weights"));
  m.def("add_rms_norm", &add_rms_norm, py::arg("x"), py::arg("residual"), py::arg("weight"),
        py::arg("eps"), py::arg("static_weights"));
}
