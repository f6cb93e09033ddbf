// SPDX-License-Identifier: Apache-2.0
// Attention over contiguous K and V without Python: errors against float64, then times. From csrc:
//   nvcc -std=c++17 -O3 -arch=native -I. -I../shared_csrc/include -Itests tests/attn_test.cu family.cu \
//     attention/decode.cu attention/decode_plan.cpp -o /tmp/attn_test && /tmp/attn_test
#include "decode_check.cuh"

namespace {

using namespace check;
using astrai::attention::ContigKv;
using astrai::attention::DecodeParams;

struct Case {
  explicit Case(const DecodeShape& s)
      : s(s),
        q(size_t(s.batch) * s.q_heads * s.head_dim),
        out(q.host.size()),
        k(size_t(s.batch) * s.length * s.kv_heads * s.head_dim),
        v(k.host.size()) {
    Random random(static_cast<uint32_t>(s.length + s.head_dim));
    fill(q, random);
    fill(k, random);
    fill(v, random);
    poison(out);
  }
  DecodeParams<ContigKv> params() const {
    DecodeParams<ContigKv> p{};
    p.q = q.device;
    p.out = out.device;
    const int64_t token = int64_t{s.kv_heads} * s.head_dim;
    p.kv = {k.device, v.device, token * s.length, token, s.head_dim, s.length};
    return p;
  }
  const Bf16* row(const Buffer<Bf16>& x, int b, int token, int head) const {
    return x.host.data() + ((size_t(b) * s.length + token) * s.kv_heads + head) * s.head_dim;
  }
  DecodeShape s;
  Buffer<Bf16> q, out, k, v;
};

void check_decode(Table& table, const DecodeShape& s) {
  Case c(s);
  decode(s, c.params(), nullptr);
  c.out.down();
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.q_heads; ++h) {
      const int kv_head = h / (s.q_heads / s.kv_heads);
      const size_t at = (size_t(b) * s.q_heads + h) * s.head_dim;
      table.add("decode",
                attend(
                    c.q.host.data() + at, [&](int t) { return c.row(c.k, b, t, kv_head); },
                    [&](int t) { return c.row(c.v, b, t, kv_head); }, s.length, s.head_dim,
                    [](int) { return true; }),
                c.out.host.data() + at);
    }
  char shape[64];
  std::snprintf(shape, sizeof shape, "B=%d kv=%d hq=%d hk=%d d=%d", s.batch, s.length, s.q_heads,
                s.kv_heads, s.head_dim);
  table.line(shape);
}

}  // namespace

int main() {
  Table table;
  for (const int head_dim : {32, 64, 128, 256})
    for (const auto& [batch, q_heads, kv_heads, length] :
         {std::tuple{1, 8, 2, 1}, {2, 8, 8, 17}, {3, 12, 4, 300}, {1, 9, 1, 100}, {1, 8, 2, 3000}})
      check_decode(table, {batch, q_heads, kv_heads, head_dim, length});
  std::printf("\n%-44s %10s %8s\n", "decode", "us", "TB/s");
  for (const DecodeShape& s : {DecodeShape{1, 32, 8, 128, 4096}, {16, 32, 8, 128, 4096}}) {
    const Case c(s);
    const double us = time_us([&](cudaStream_t stream) { decode(s, c.params(), stream); });
    std::printf("B=%-3d kv=%-34d %10.1f %8.2f\n", s.batch, s.length, us,
                4.0 * c.k.host.size() / us * 1e-6);
  }
  return table.status();
}
