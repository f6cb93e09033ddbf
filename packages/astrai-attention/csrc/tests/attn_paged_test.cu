// SPDX-License-Identifier: Apache-2.0
// Attention over paged K and V without Python: errors against float64, then times. From csrc:
//   nvcc -std=c++17 -O3 -arch=native -I. -I../shared_csrc/include -I../shared_csrc/tests -Itests \
//     tests/attn_paged_test.cu family.cu attention/*.cu attention/*.cpp -o /tmp/attn_paged_test &&
//     /tmp/attn_paged_test
// With -DASTRAI_NO_MMA: the scalar bodies.
#include "attention/schedule.h"
#include "decode_check.cuh"
#include "prefill_check.cuh"

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
  PagedKv kv() const {
    PagedKv kv{};
    kv.k = k.device;
    kv.v = v.device;
    const int64_t d = s.head_dim;
    kv.page_stride = d * s.kv_heads * page_size;
    kv.token_stride = heads_first ? d : d * s.kv_heads;
    kv.head_stride = heads_first ? d * page_size : d;
    kv.page_table = table.device;
    kv.table_stride = pages;
    kv.lengths = lengths.device;
    while (page_size >> kv.page_shift > 1) ++kv.page_shift;
    return kv;
  }
  void decode(cudaStream_t stream) const {
    DecodeParams<PagedKv> params{};
    params.q = q.device;
    params.out = out.device;
    params.kv = kv();
    check::decode(capacity(), params, stream);
  }
  std::vector<double> expected(const Bf16* query, int b, int q_head, int seen) const {
    const int head = q_head / (s.q_heads / s.kv_heads);
    return attend(
        query, [&](int t) { return k.host.data() + place(b, t, head); },
        [&](int t) { return v.host.data() + place(b, t, head); }, std::max(seen, 0), s.head_dim,
        [](int) { return true; });
  }
  void line(Table& table) const {
    char shape[64];
    std::snprintf(shape, sizeof shape, "B=%d kv<=%d hq=%d hk=%d d=%d page=%d%s", s.batch, s.length,
                  s.q_heads, s.kv_heads, s.head_dim, page_size, heads_first ? " heads first" : "");
    table.line(shape);
  }
  DecodeShape s;
  int page_size, pages;
  bool heads_first;
  Buffer<Bf16> q, out, k, v;
  Buffer<int> table, lengths;
};

void check_decode(Table& table, const DecodeShape& s, int page_size, bool heads_first) {
  Case c(s, page_size, heads_first);
  c.decode(nullptr);
  c.out.down();
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.q_heads; ++h) {
      const size_t at = (size_t(b) * s.q_heads + h) * s.head_dim;
      table.add("paged decode", c.expected(c.q.host.data() + at, b, h, c.lengths.host[b]),
                c.out.host.data() + at);
    }
  c.line(table);
}

// A ragged batch, causal: of each sequence the last queries, of some more than it has keys.
void check_prefill(Table& table, const DecodeShape& s, int page_size, bool heads_first) {
  using namespace astrai::attention;
  Case c(s, page_size, heads_first);
  Random random(7);
  std::vector<int64_t> q_lens;
  Buffer<int> kv_indptr(static_cast<size_t>(s.batch) + 1);
  for (int b = 0; b < s.batch; ++b) {
    q_lens.push_back(random.below(150));
    kv_indptr.host[b + 1] = kv_indptr.host[b] + c.lengths.host[b];
  }
  kv_indptr.up();
  const QTileSchedule maps = q_tile_schedule(q_lens, kQTileRows);
  const auto upload = [](Buffer<int>& to, const std::vector<int32_t>& from) {
    std::copy(from.begin(), from.end(), to.host.begin());
    to.up();
  };
  Buffer<int> qo_indptr(maps.qo_indptr.size()), to_batch(maps.q_tile_to_batch.size()),
      to_index(maps.q_tile_to_index.size());
  upload(qo_indptr, maps.qo_indptr);
  upload(to_batch, maps.q_tile_to_batch);
  upload(to_index, maps.q_tile_to_index);
  const size_t row = size_t(s.q_heads) * s.head_dim;
  Buffer<Bf16> q(maps.qo_indptr.back() * row), out(q.host.size());
  fill(q, random);
  poison(out);

  const int tiles = static_cast<int>(to_batch.host.size());
  const PrefillPlan plan =
      plan_prefill({0, 0, 0, tiles, s.q_heads, s.kv_heads, s.head_dim, false}, device_info(0));
  PackedPrefillParams params{};
  params.q = q.device;
  params.out = out.device;
  set_common(params, plan, s.q_heads, s.kv_heads, s.head_dim, 0, true);
  params.schedule = {qo_indptr.device,
                     to_batch.device,
                     to_index.device,
                     plan.rows,
                     s.q_heads >> plan.heads_shift,
                     tiles * plan.blocks_per_tile,
                     plan.blocks_per_tile,
                     plan.tiles_per_block};
  params.kv = c.kv();
  params.kv.lengths = kv_indptr.device;
  params.kv.ragged = true;
  launch_prefill(params, plan, s.head_dim, 0, nullptr);
  out.down();
  for (int b = 0; b < s.batch; ++b)
    for (int i = 0; i < q_lens[b]; ++i)
      for (int h = 0; h < s.q_heads; ++h) {
        const size_t at = (maps.qo_indptr[b] + i) * row + size_t(h) * s.head_dim;
        const int seen = c.lengths.host[b] - static_cast<int>(q_lens[b]) + i + 1;
        table.add("paged prefill", c.expected(q.host.data() + at, b, h, seen),
                  out.host.data() + at);
      }
  c.line(table);
}

}  // namespace

int main() {
  Table table;
  for (const int head_dim : {32, 64, 128, 256})
    for (const int page_size : {1, 16, 256})
      for (const bool heads_first : {false, true}) {
        check_decode(table, {3, 12, 4, head_dim, 300}, page_size, heads_first);
        check_decode(table, {2, 8, 2, head_dim, 2500}, page_size, heads_first);
        check_prefill(table, {4, 6, 2, head_dim, 200}, page_size, heads_first);
      }
  std::printf("\n%-44s %10s %8s\n", "paged decode", "us", "TB/s");
  for (const int page_size : {1, 16}) {
    const DecodeShape s{1, 32, 8, 128, 4096};
    const Case c(s, page_size, false);
    const double us = time_us([&](cudaStream_t stream) { c.decode(stream); });
    std::printf("B=%-3d kv=%-6d page=%-21d %10.1f %8.2f\n", s.batch, s.length, page_size, us,
                4.0 * s.length * s.kv_heads * s.head_dim / us * 1e-6);
  }
  return table.status();
}
