// SPDX-License-Identifier: Apache-2.0
// Attention over paged K and V without Python: errors against float64, then times. From csrc:
//   nvcc -std=c++17 -O3 -arch=native -I. -I../shared_csrc/include -Itests tests/attn_paged_test.cu \
//     family.cu attention/decode.cu attention/decode_plan.cpp -o /tmp/attn_paged_test &&
//     /tmp/attn_paged_test
#include "decode_check.cuh"

namespace {

using namespace check;
using astrai::attention::DecodeParams;
using astrai::attention::PagedKv;

// Sequences of different lengths, the last of `shape.length`, in pages of random order. Memory past a
// length is NaN, the ids past its last page are huge.
struct Case {
  Case(const DecodeShape& s, int page_size, bool heads_first)
      : s(s),
        page_size(page_size),
        pages((s.length + page_size - 1) / page_size + 1),
        heads_first(heads_first),
        q(size_t(s.batch) * s.q_heads * s.head_dim),
        out(q.host.size()),
        k(size_t(s.batch) * pages * page_size * s.kv_heads * s.head_dim),
        v(k.host.size()),
        table(size_t(s.batch) * pages),
        lengths(static_cast<size_t>(s.batch)) {
    Random random(static_cast<uint32_t>(s.length + page_size));
    fill(q, random);
    poison(k);
    poison(v);
    poison(out);
    std::vector<int> order(table.host.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[random.below(static_cast<int>(i))]);
    for (int b = 0; b < s.batch; ++b) {
      const int length = b + 1 == s.batch ? s.length : random.below(s.length + 1);
      lengths.host[b] = length;
      for (int page = 0; page < pages; ++page) {
        const size_t at = size_t(b) * pages + page;
        table.host[at] = page * page_size < length ? order[at] : 1 << 30;
      }
      for (int t = 0; t < length; ++t)
        for (int h = 0; h < s.kv_heads; ++h)
          for (int d = 0; d < s.head_dim; ++d) {
            k.host[place(b, t, h) + d] = __float2bfloat16(random.next());
            v.host[place(b, t, h) + d] = __float2bfloat16(random.next());
          }
    }
    k.up();
    v.up();
    table.up();
    lengths.up();
  }
  size_t place(int b, int token, int head) const {
    const size_t page = static_cast<size_t>(table.host[size_t(b) * pages + token / page_size]);
    const size_t slot = static_cast<size_t>(token % page_size);
    return heads_first ? ((page * s.kv_heads + head) * page_size + slot) * s.head_dim
                       : ((page * page_size + slot) * s.kv_heads + head) * s.head_dim;
  }
  DecodeShape capacity() const {
    return {s.batch, s.q_heads, s.kv_heads, s.head_dim, pages * page_size};
  }
  DecodeParams<PagedKv> params() const {
    DecodeParams<PagedKv> p{};
    p.q = q.device;
    p.out = out.device;
    int shift = 0;
    while (page_size >> shift > 1) ++shift;
    const int64_t d = s.head_dim;
    p.kv = {k.device,
            v.device,
            d * s.kv_heads * page_size,
            heads_first ? d : d * s.kv_heads,
            heads_first ? d * page_size : d,
            table.device,
            pages,
            lengths.device,
            /*ragged=*/false,
            shift};
    return p;
  }
  DecodeShape s;
  int page_size, pages;
  bool heads_first;
  Buffer<Bf16> q, out, k, v;
  Buffer<int> table, lengths;
};

void check_decode(Table& table, const DecodeShape& s, int page_size, bool heads_first) {
  Case c(s, page_size, heads_first);
  decode(c.capacity(), c.params(), nullptr);
  c.out.down();
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.q_heads; ++h) {
      const int kv_head = h / (s.q_heads / s.kv_heads);
      const size_t at = (size_t(b) * s.q_heads + h) * s.head_dim;
      table.add(
          "paged decode",
          attend(
              c.q.host.data() + at, [&](int t) { return c.k.host.data() + c.place(b, t, kv_head); },
              [&](int t) { return c.v.host.data() + c.place(b, t, kv_head); }, c.lengths.host[b],
              s.head_dim, [](int) { return true; }),
          c.out.host.data() + at);
    }
  char shape[64];
  std::snprintf(shape, sizeof shape, "B=%d kv<=%d hq=%d hk=%d d=%d page=%d%s", s.batch, s.length,
                s.q_heads, s.kv_heads, s.head_dim, page_size, heads_first ? " heads first" : "");
  table.line(shape);
}

}  // namespace

int main() {
  Table table;
  for (const int head_dim : {32, 64, 128, 256})
    for (const int page_size : {1, 16, 256})
      for (const bool heads_first : {false, true}) {
        check_decode(table, {3, 12, 4, head_dim, 300}, page_size, heads_first);
        check_decode(table, {2, 8, 2, head_dim, 2500}, page_size, heads_first);
      }
  std::printf("\n%-44s %10s %8s\n", "paged decode", "us", "TB/s");
  for (const int page_size : {1, 16}) {
    const DecodeShape s{1, 32, 8, 128, 4096};
    const Case c(s, page_size, false);
    const double us =
        time_us([&](cudaStream_t stream) { decode(c.capacity(), c.params(), stream); });
    std::printf("B=%-3d kv=%-6d page=%-21d %10.1f %8.2f\n", s.batch, s.length, page_size, us,
                4.0 * s.length * s.kv_heads * s.head_dim / us * 1e-6);
  }
  return table.status();
}
