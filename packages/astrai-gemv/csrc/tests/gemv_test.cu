// SPDX-License-Identifier: Apache-2.0
// The linear kernels and the norm without Python: errors against float64, then times. From csrc:
//   nvcc -std=c++17 -O3 -arch=native -I. -I../shared_csrc/include -I../shared_csrc/tests \
//     tests/gemv_test.cu gemv/gemv.cu gemv/gemv_plan.cpp swiglu/swiglu.cu norm/add_rms_norm.cu \
//     norm/add_rms_norm_plan.cpp -o /tmp/gemv_test && /tmp/gemv_test
#include "gemv/gemv.h"
#include "check.cuh"
#include "gemv/gemv_params.h"
#include "gemv/gemv_plan.h"
#include "norm/add_rms_norm.h"

namespace {

using namespace check;
using namespace astrai::gemv;

struct Shape {
  int m, n, k;
  bool swiglu;
  bool static_weights;
  int offset;  // elements of x, the weights and the output past 16 bytes; gemv only
};

double rounded(double value) { return __bfloat162float(__float2bfloat16(float(value))); }

struct Case {
  explicit Case(const Shape& s)
      : s(s),
        x(size_t(s.m) * s.k + s.offset),
        weight(size_t(s.n) * s.k + s.offset),
        gate(s.swiglu ? weight.host.size() : 0),
        bias(s.n),
        out(size_t(s.m) * s.n + s.offset) {
    Random random(static_cast<uint32_t>(s.n + s.k));
    // Sums of K products near 1.
    fill(x, random, 1.0f / std::sqrt(float(s.k)));
    fill(weight, random);
    fill(gate, random);
    fill(bias, random);
    poison(out);
  }
  void launch(cudaStream_t stream) const {
    GemvParams params{};
    params.x = x.device + s.offset;
    params.weight = weight.device + s.offset;
    params.row_stride = s.k;
    if (s.swiglu) {
      params.gate = gate.device + s.offset;
      params.gate_stride = s.k;
    } else {
      params.bias = bias.device;
    }
    params.out = out.device + s.offset;
    params.m = s.m;
    params.n = s.n;
    params.k = s.k;
    params.static_weights = s.static_weights;
    const GemvPlan plan =
        plan_gemv({s.m, s.n, s.k, s.k, reinterpret_cast<uint64_t>(params.weight),
                   reinterpret_cast<uint64_t>(params.x), s.swiglu, s.static_weights},
                  device_info(0));
    params.window = plan.window;
    params.parts = plan.parts;
    (s.swiglu ? launch_swiglu : launch_gemv)(params, plan, 0, stream);
  }
  double product(const Buffer<Bf16>& matrix, int token, int row) const {
    double sum = 0.0;
    for (int i = 0; i < s.k; ++i)
      sum += double{__bfloat162float(x.host[s.offset + size_t(token) * s.k + i])} *
             double{__bfloat162float(matrix.host[s.offset + size_t(row) * s.k + i])};
    return sum;
  }
  double wanted(int token, int row) const {
    const double up = product(weight, token, row);
    if (!s.swiglu) return up + double{__bfloat162float(bias.host[row])};
    const double g = rounded(product(gate, token, row));
    return rounded(up) * rounded(g / (1.0 + std::exp(-g)));
  }
  void check(Table& table) {
    launch(nullptr);
    ok(cudaDeviceSynchronize(), "launch");
    out.down();
    for (int token = 0; token < s.m; ++token) {
      std::vector<double> want(static_cast<size_t>(s.n));
      for (int row = 0; row < s.n; ++row) want[row] = wanted(token, row);
      table.add(s.swiglu ? "bf16_swiglu" : "bf16_gemv", want,
                out.host.data() + s.offset + size_t(token) * s.n);
    }
    char text[64];
    std::snprintf(text, sizeof text, "m=%d n=%d k=%d%s%s", s.m, s.n, s.k,
                  s.static_weights ? " static" : "", s.offset > 0 ? " misaligned" : "");
    table.line(text);
  }

  Shape s;
  Buffer<Bf16> x, weight, gate, bias, out;
};

void check_norm(Table& table, int m, int hidden) {
  Buffer<Bf16> x(size_t(m) * hidden), residual(x.host.size()), weight(hidden), out(x.host.size()),
      sum(x.host.size());
  Random random(static_cast<uint32_t>(hidden));
  for (Buffer<Bf16>* buffer : {&x, &residual, &weight}) fill(*buffer, random);
  poison(out);
  poison(sum);
  constexpr float kEps = 1e-5f;
  AddRmsNormParams params{x.device, residual.device, weight.device, out.device, sum.device,
                          m,        hidden,          kEps,          false};
  launch_add_rms_norm(params, plan_add_rms_norm(hidden, hidden % 8 == 0, device_info(0)), nullptr);
  ok(cudaDeviceSynchronize(), "launch");
  out.down();
  sum.down();
  for (int token = 0; token < m; ++token) {
    const size_t row = size_t(token) * hidden;
    std::vector<double> total(static_cast<size_t>(hidden)), want(total.size());
    double squares = 0.0;
    for (int i = 0; i < hidden; ++i) {
      total[i] = rounded(double{__bfloat162float(x.host[row + i])} +
                         double{__bfloat162float(residual.host[row + i])});
      squares += total[i] * total[i];
    }
    for (int i = 0; i < hidden; ++i)
      want[i] = double{__bfloat162float(weight.host[i])} *
                rounded(total[i] / std::sqrt(squares / hidden + double{kEps}));
    table.add("add_rms_norm", total, sum.host.data() + row);
    table.add("add_rms_norm", want, out.host.data() + row);
  }
  char text[64];
  std::snprintf(text, sizeof text, "m=%d hidden=%d", m, hidden);
  table.line(text);
}

}  // namespace

int main() {
  Table table;
  for (const bool static_weights : {false, true})
    for (const Shape& s :
         {Shape{1, 1, 1, false}, Shape{3, 17, 40, false}, Shape{8, 300, 576, false},
          Shape{1, 400, 4096, false}, Shape{5, 133, 4095, false},
          // x in several windows, of two segments and of one.
          Shape{2, 257, 8200, false}, Shape{4, 4300, 8192, false}, Shape{8, 4300, 5000, false},
          Shape{3, 2200, 6000, true}, Shape{8, 2200, 6000, true},
          // Clusters of 8 and of 2 that share K.
          Shape{8, 40, 4104, false}, Shape{3, 300, 8192, false}, Shape{1, 1, 16384, false},
          Shape{4, 100, 328, false, false, 3}, Shape{8, 40, 264, true}, Shape{2, 129, 8200, true},
          Shape{5, 150, 4608, true}}) {
      Shape shape = s;
      shape.static_weights = static_weights;
      Case(shape).check(table);
    }
  for (const int hidden : {1, 100, 2048, 8200}) check_norm(table, 3, hidden);
  for (const Shape& s : {Shape{1, 4096, 4096, false, true}, Shape{8, 4096, 4096, false, true},
                         Shape{1, 2048, 8192, false, true}, Shape{1, 8192, 2048, true, true}}) {
    const Case one(s);
    std::printf("%-12s m=%d n=%d k=%d: %.2f us, weights in L2\n",
                s.swiglu ? "bf16_swiglu" : "bf16_gemv", s.m, s.n, s.k,
                time_us([&](cudaStream_t stream) { one.launch(stream); }));
  }
  return table.status();
}
