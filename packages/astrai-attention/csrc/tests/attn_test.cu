// SPDX-License-Identifier: Apache-2.0
// Attention over contiguous K and V without Python: errors against float64, then times. From csrc:
//   nvcc -std=c++17 -O3 -arch=native -I. -I../shared_csrc/include -I../shared_csrc/tests -Itests \
//     tests/attn_test.cu family.cu attention/*.cu attention/*.cpp -o /tmp/attn_test && /tmp/attn_test
// With -DASTRAI_NO_MMA: the scalar bodies.
#include <tuple>

#include "decode_check.cuh"
#include "prefill_check.cuh"

namespace {

using namespace check;
using astrai::attention::DecodeParams;

struct Case {
  Case(const DecodeShape& s, int q_len)
      : s(s),
        q_len(q_len),
        q(size_t(s.batch) * q_len * s.q_heads * s.head_dim),
        out(q.host.size()),
        k(size_t(s.batch) * s.length * s.kv_heads * s.head_dim),
        v(k.host.size()) {
    Random random(static_cast<uint32_t>(s.length + s.head_dim));
    fill(q, random);
    fill(k, random);
    fill(v, random);
    poison(out);
  }
  astrai::attention::ContigKv kv() const {
    const int64_t token = int64_t{s.kv_heads} * s.head_dim;
    return {k.device, v.device, token * s.length, token, s.head_dim, s.length};
  }
  void decode(cudaStream_t stream) const {
    DecodeParams<astrai::attention::ContigKv> params{};
    params.q = q.device;
    params.out = out.device;
    params.kv = kv();
    check::decode(s, params, stream);
  }
  void prefill(bool causal, cudaStream_t stream) const {
    using namespace astrai::attention;
    const PrefillPlan plan = plan_prefill(
        {s.batch, q_len, s.length, 0, s.q_heads, s.kv_heads, s.head_dim, false}, device_info(0));
    DensePrefillParams params{};
    params.q = q.device;
    params.out = out.device;
    set_common(params, plan, s.q_heads, s.kv_heads, s.head_dim, q_len, causal);
    const int groups = s.q_heads >> plan.heads_shift;
    params.schedule = {q_len, plan.tiles, plan.rows, groups, s.batch * groups, plan.section};
    params.kv = kv();
    launch_prefill(params, plan, s.head_dim, 0, stream);
  }
  void check(Table& table, const char* name, bool causal) {
    out.down();
    for (int b = 0; b < s.batch; ++b)
      for (int i = 0; i < q_len; ++i)
        for (int h = 0; h < s.q_heads; ++h) {
          const int kv_head = h / (s.q_heads / s.kv_heads);
          const size_t at = ((size_t(b) * q_len + i) * s.q_heads + h) * s.head_dim;
          const auto row = [&](const Buffer<Bf16>& x, int token) {
            return x.host.data() +
                   ((size_t(b) * s.length + token) * s.kv_heads + kv_head) * s.head_dim;
          };
          table.add(name,
                    attend(
                        q.host.data() + at, [&](int t) { return row(k, t); },
                        [&](int t) { return row(v, t); }, s.length, s.head_dim,
                        [&](int t) { return !causal || t <= s.length - q_len + i; }),
                    out.host.data() + at);
        }
    char shape[64];
    std::snprintf(shape, sizeof shape, "B=%d q=%d kv=%d hq=%d hk=%d d=%d%s", s.batch, q_len,
                  s.length, s.q_heads, s.kv_heads, s.head_dim, causal ? " causal" : "");
    table.line(shape);
  }
  DecodeShape s;
  int q_len;
  Buffer<Bf16> q, out, k, v;
};

}  // namespace

int main() {
  Table table;
  for (const int head_dim : {32, 64, 128, 256}) {
    for (const auto& [batch, q_heads, kv_heads, length] : {std::tuple{1, 8, 2, 1},
                                                           {2, 8, 8, 17},
                                                           {3, 12, 4, 300},
                                                           {1, 9, 1, 100},
                                                           {1, 8, 2, 3000}}) {
      Case c({batch, q_heads, kv_heads, head_dim, length}, 1);
      c.decode(nullptr);
      c.check(table, "decode", false);
    }
    for (const auto& [q_len, kv_len] : {std::pair{17, 17}, {130, 200}, {70, 40}})
      for (const bool causal : {false, true}) {
        Case c({2, 6, 2, head_dim, kv_len}, q_len);
        c.prefill(causal, nullptr);
        c.check(table, "prefill", causal);
      }
  }
  std::printf("\n%-44s %10s %8s\n", "decode", "us", "TB/s");
  for (const DecodeShape& s : {DecodeShape{1, 32, 8, 128, 4096}, {16, 32, 8, 128, 4096}}) {
    const Case c(s, 1);
    const double us = time_us([&](cudaStream_t stream) { c.decode(stream); });
    std::printf("B=%-3d kv=%-34d %10.1f %8.2f\n", s.batch, s.length, us,
                4.0 * c.k.host.size() / us * 1e-6);
  }
  std::printf("\n%-44s %10s %8s\n", "prefill, causal", "us", "TFLOP/s");
  for (const int length : {2048, 8192}) {
    const Case c({1, 32, 8, 128, length}, length);
    const double us = time_us([&](cudaStream_t stream) { c.prefill(true, stream); });
    std::printf("S=%-40d %10.1f %8.0f\n", length, us, 2.0 * length * length * 32 * 128 / us * 1e-6);
  }
  return table.status();
}
