// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <optional>
#include <vector>

#include "astrai/host/torch_exchange.h"
#include "attention/prefill_params.h"
#include "attention/prefill_plan.h"
#include "attention/schedule.h"
#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "family.h"

namespace py = pybind11;

namespace {

using astrai::concat;
using astrai::DType;
using astrai::TensorView;
using astrai::TorchExchange;
using astrai::ValueError;
namespace attention = astrai::attention;

using Bf16 = __nv_bfloat16;

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();

void check_heads(const TensorView& q, const TensorView& k) {
  const int64_t heads = q.size(-2), kv_heads = k.size(-2);
  if (kv_heads < 1 ? heads > 0 : heads % kv_heads != 0)
    throw ValueError(
        concat(k.name(), ": expected kv_heads that divide q_heads = ", heads, ", got ", kv_heads));
}

void check_index(const TensorView& index, const char* layout) {
  index.expect_dtype(DType::kInt32).expect_rank(1, 1, layout).expect_contiguous();
}

void check_mask(const TensorView& mask, const TensorView& q, const TensorView& k) {
  mask.expect_dtype(DType::kBool)
      .expect_rank(2, 4, "[batch, kv_len], [batch, q_len, kv_len] or [batch, 1, q_len, kv_len]")
      .expect_size(0, q.size(0), "batch of q")
      .expect_size(-1, k.size(1), "kv_len of k");
  if (mask.rank() >= 3) mask.expect_size(-2, q.size(1), "q_len of q");
  if (mask.rank() == 4) mask.expect_size(1, 1, "all heads");
  if (mask.size(-1) > 1 && mask.stride(-1) != 1)
    throw ValueError(
        concat("mask: expected stride 1 in the last dimension, got strides ", mask.strides_text()));
}

attention::QStrides q_strides(const TensorView& x) {
  return {x.rank() == 4 ? x.stride(0) : 0, x.stride(-3), x.stride(-2)};
}

// What both ops set alike.
template <class Params>
void set_common(Params& params, const TensorView& q, const TensorView& out, float scale,
                const attention::PrefillPlan& plan, int64_t group, bool causal) {
  params.q = q.data<Bf16>();
  params.out = out.data<Bf16>();
  params.q_stride = q_strides(q);
  params.out_stride = q_strides(out);
  params.scale_log2 = scale;
  params.slack = attention::kPrefillSlack / scale;
  params.heads_shift = plan.heads_shift;
  params.group = static_cast<int>(group);
  params.causal = causal;
}

py::object attn_prefill(py::handle q_, py::handle k_, py::handle v_, py::handle mask_,
                        py::handle is_causal_, py::handle scale_, py::handle return_lse_,
                        py::handle out_, py::handle lse_) {
  const TorchExchange& torch = TorchExchange::get();
  const bool causal = astrai::as_bool("is_causal", is_causal_);
  const bool with_lse = astrai::as_bool("return_lse", return_lse_) || !lse_.is_none();
  const TensorView q = torch.view("q", q_);
  const TensorView k = torch.view("k", k_);
  const TensorView v = torch.view("v", v_);
  q.expect_dtype(DType::kBFloat16)
      .expect_rank(4, 4, "[batch, q_len, q_heads, head_dim]")
      .expect_size_in(0, 0, kMaxCount, "batch")
      .expect_size_in(1, 0, attention::kPrefillMaxLength, "q_len")
      .expect_size_in(2, 0, kMaxCount, "q_heads");
  attention::check_head_dim(q);
  q.expect_aligned_rows();
  k.expect_dtype(DType::kBFloat16)
      .expect_rank(4, 4, "[batch, kv_len, kv_heads, head_dim]")
      .expect_size(0, q.size(0), "batch of q")
      .expect_size_in(1, 0, attention::kPrefillMaxLength, "kv_len")
      .expect_size(3, q.size(3), "head_dim of q");
  check_heads(q, k);
  k.expect_aligned_rows();
  attention::check_v(v, k, "[batch, kv_len, kv_heads, head_dim]");
  std::optional<TensorView> mask;
  if (!mask_.is_none()) check_mask(mask.emplace(torch.view("mask", mask_)), q, k);
  const float scale = attention::scale_log2(scale_, q.size(3));
  std::optional<TensorView> out = attention::check_out(out_, q);
  std::optional<TensorView> lse =
      attention::check_lse(lse_, {q.size(0), q.size(2), q.size(1)}, "[batch, q_heads, q_len]");
  attention::expect_apart({astrai::address(out), astrai::address(lse)},
                          {&q, &k, &v, astrai::address(mask)});
  torch.refuse_grad("attn_prefill",
                    {{"q", q_}, {"k", k_}, {"v", v_}, {"out", out_}, {"lse", lse_}});
  astrai::expect_one_gpu(
      q, {&k, &v, astrai::address(mask), astrai::address(out), astrai::address(lse)});

  const int64_t batch = q.size(0), q_len = q.size(1), heads = q.size(2), kv_len = k.size(1);
  const py::object result = out ? py::reinterpret_borrow<py::object>(out_) : torch.empty_like(q_);
  py::object lse_result = py::reinterpret_borrow<py::object>(lse_);
  if (with_lse && !lse) lse_result = torch.new_empty_fp32(q_, {batch, heads, q_len});
  if (q.numel() == 0) return attention::answer(result, lse_result);
  if (!out) out.emplace(torch.view("out", result));
  if (with_lse && !lse) lse.emplace(torch.view("lse", lse_result));

  // Without keys there is nothing to mask, and perhaps no memory.
  const bool masked = mask && mask->numel() > 0;
  const int device = q.device_index();
  const attention::PrefillPlan plan =
      attention::plan_prefill({batch, q_len, kv_len, 0, heads, k.size(2), q.size(3), masked},
                              attention::device_info(device));
  attention::DensePrefillParams params{};
  set_common(params, q, *out, scale, plan, heads / k.size(2), causal);
  if (lse) params.lse = lse->data<float>();
  params.lse_batch = heads * q_len;
  params.lse_head = q_len;
  const int groups = static_cast<int>(heads >> plan.heads_shift);
  params.schedule = {static_cast<int>(q_len),          plan.tiles,  plan.rows, groups,
                     static_cast<int>(batch * groups), plan.section};
  params.kv = {k.data<Bf16>(), v.data<Bf16>(), k.stride(0),
               k.stride(1),    k.stride(2),    static_cast<int>(kv_len)};
  if (masked)
    params.mask = {mask->data<uint8_t>(), mask->stride(0), mask->rank() > 2 ? mask->stride(-2) : 0};
  astrai::DeviceGuard guard(device);
  attention::launch_prefill(params, plan, static_cast<int>(q.size(3)), device,
                            torch.current_stream(q.device()));
  if (!out_.is_none()) torch.mark_written(out_);
  if (!lse_.is_none()) torch.mark_written(lse_);
  return attention::answer(result, lse_result);
}

py::object attn_paged_prefill(py::handle q_, py::handle k_pool_, py::handle v_pool_,
                              py::handle page_table_, py::handle qo_indptr_, py::handle kv_indptr_,
                              py::handle q_tile_to_batch_, py::handle q_tile_to_index_,
                              py::handle page_size_, py::handle is_causal_, py::handle scale_,
                              py::handle return_lse_, py::handle out_, py::handle lse_) {
  const TorchExchange& torch = TorchExchange::get();
  const bool causal = astrai::as_bool("is_causal", is_causal_);
  const bool with_lse = astrai::as_bool("return_lse", return_lse_) || !lse_.is_none();
  const int64_t page_size = attention::as_page_size(page_size_);
  const TensorView q = torch.view("q", q_);
  const TensorView k = torch.view("k_pool", k_pool_);
  const TensorView v = torch.view("v_pool", v_pool_);
  const TensorView page_table = torch.view("page_table", page_table_);
  const TensorView qo_indptr = torch.view("qo_indptr", qo_indptr_);
  const TensorView kv_indptr = torch.view("kv_indptr", kv_indptr_);
  const TensorView to_batch = torch.view("q_tile_to_batch", q_tile_to_batch_);
  const TensorView to_index = torch.view("q_tile_to_index", q_tile_to_index_);
  q.expect_dtype(DType::kBFloat16)
      .expect_rank(3, 3, "[total_q, q_heads, head_dim]")
      .expect_size_in(0, 0, kMaxCount, "total_q")
      .expect_size_in(1, 0, kMaxCount, "q_heads");
  attention::check_head_dim(q);
  q.expect_aligned_rows();
  k.expect_dtype(DType::kBFloat16)
      .expect_rank(4, 4, "[pages, page_size, kv_heads, head_dim]")
      .expect_size_in(0, 0, kMaxCount, "pages")
      .expect_size(1, page_size, "page_size")
      .expect_size(3, q.size(2), "head_dim of q");
  check_heads(q, k);
  k.expect_aligned_rows();
  attention::check_v(v, k, "[pages, page_size, kv_heads, head_dim]");
  page_table.expect_dtype(DType::kInt32)
      .expect_rank(2, 2, "[batch, max_pages]")
      .expect_rows_contiguous();
  const int64_t batch = page_table.size(0);
  check_index(qo_indptr, "[batch + 1]");
  qo_indptr.expect_size(0, batch + 1, "batch of page_table, and 1");
  check_index(kv_indptr, "[batch + 1]");
  kv_indptr.expect_size(0, batch + 1, "batch of page_table, and 1");
  check_index(to_batch, "[q_tiles]");
  to_batch.expect_size_in(0, (q.size(0) + attention::kQTileRows - 1) / attention::kQTileRows,
                          kMaxCount, "tiles for all rows of q");
  check_index(to_index, "[q_tiles]");
  to_index.expect_size(0, to_batch.size(0), "tiles of q_tile_to_batch");
  const float scale = attention::scale_log2(scale_, q.size(2));
  std::optional<TensorView> out = attention::check_out(out_, q);
  std::optional<TensorView> lse =
      attention::check_lse(lse_, {q.size(1), q.size(0)}, "[q_heads, total_q]");
  attention::expect_apart({astrai::address(out), astrai::address(lse)},
                          {&q, &k, &v, &page_table, &qo_indptr, &kv_indptr, &to_batch, &to_index});
  torch.refuse_grad(
      "attn_paged_prefill",
      {{"q", q_}, {"k_pool", k_pool_}, {"v_pool", v_pool_}, {"out", out_}, {"lse", lse_}});
  astrai::expect_one_gpu(q, {&k, &v, &page_table, &qo_indptr, &kv_indptr, &to_batch, &to_index,
                             astrai::address(out), astrai::address(lse)});

  const int64_t total = q.size(0), heads = q.size(1);
  const py::object result = out ? py::reinterpret_borrow<py::object>(out_) : torch.empty_like(q_);
  py::object lse_result = py::reinterpret_borrow<py::object>(lse_);
  if (with_lse && !lse) lse_result = torch.new_empty_fp32(q_, {heads, total});
  if (q.numel() == 0) return attention::answer(result, lse_result);
  if (!out) out.emplace(torch.view("out", result));
  if (with_lse && !lse) lse.emplace(torch.view("lse", lse_result));

  const int device = q.device_index();
  const attention::PrefillPlan plan =
      attention::plan_prefill({0, 0, 0, to_batch.size(0), heads, k.size(2), q.size(2), false},
                              attention::device_info(device));
  attention::PackedPrefillParams params{};
  set_common(params, q, *out, scale, plan, heads / k.size(2), causal);
  if (lse) params.lse = lse->data<float>();
  params.lse_head = total;
  params.schedule = {qo_indptr.data<int>(),
                     to_batch.data<int>(),
                     to_index.data<int>(),
                     plan.rows,
                     static_cast<int>(heads >> plan.heads_shift),
                     static_cast<int>(to_batch.size(0) * plan.blocks_per_tile),
                     plan.blocks_per_tile,
                     plan.tiles_per_block};
  params.kv.k = k.data<Bf16>();
  params.kv.v = v.data<Bf16>();
  params.kv.page_stride = k.stride(0);
  params.kv.token_stride = k.stride(1);
  params.kv.head_stride = k.stride(2);
  params.kv.page_table = page_table.data<int>();
  params.kv.table_stride = page_table.stride(0);
  params.kv.lengths = kv_indptr.data<int>();
  params.kv.ragged = true;
  while (int64_t{1} << params.kv.page_shift < page_size) ++params.kv.page_shift;
  astrai::DeviceGuard guard(device);
  attention::launch_prefill(params, plan, static_cast<int>(q.size(2)), device,
                            torch.current_stream(q.device()));
  if (!out_.is_none()) torch.mark_written(out_);
  if (!lse_.is_none()) torch.mark_written(lse_);
  return attention::answer(result, lse_result);
}

py::dict plan_prefill(int64_t batch, int64_t q_len, int64_t kv_len, int64_t q_tiles,
                      int64_t q_heads, int64_t kv_heads, int64_t head_dim, bool masked,
                      const astrai::DeviceInfo& device) {
  const attention::PrefillPlan plan = attention::plan_prefill(
      {batch, q_len, kv_len, q_tiles, q_heads, kv_heads, head_dim, masked}, device);
  py::dict result;
  result["body"] = attention::kBody;
  result["q_tile_rows"] = attention::kQTileRows;
  result["block"] = py::make_tuple(plan.block_m, plan.block_n);
  result["stages"] = plan.stages;
  result["heads"] = plan.heads();
  result["rows"] = plan.rows;
  result["tiles"] = plan.tiles;
  result["section"] = plan.section;
  result["blocks_per_tile"] = plan.blocks_per_tile;
  result["tiles_per_block"] = plan.tiles_per_block;
  result["grid"] = plan.grid;
  result["smem_bytes"] = plan.smem_bytes;
  result["programmatic"] = plan.programmatic;
  return result;
}

py::list to_list(const std::vector<int32_t>& values) {
  py::list list(values.size());
  for (size_t i = 0; i < values.size(); ++i) list[i] = values[i];
  return list;
}

py::tuple q_tile_schedule(py::handle q_lens, py::handle tile_rows) {
  std::vector<int64_t> lengths;
  for (const py::handle length : q_lens) lengths.push_back(attention::as_int("q_lens", length));
  const attention::QTileSchedule schedule =
      attention::q_tile_schedule(lengths, attention::as_int("tile_rows", tile_rows));
  return py::make_tuple(to_list(schedule.qo_indptr), to_list(schedule.q_tile_to_batch),
                        to_list(schedule.q_tile_to_index));
}

}  // namespace

void bind_prefill(py::module_& m) {
  m.def("plan_prefill", &plan_prefill, py::kw_only(), py::arg("batch"), py::arg("q_len"),
        py::arg("kv_len"), py::arg("q_tiles"), py::arg("q_heads"), py::arg("kv_heads"),
        py::arg("head_dim"), py::arg("masked"), py::arg("device"));
  m.def("q_tile_schedule", &q_tile_schedule, py::arg("q_lens"), py::arg("tile_rows"));
  m.def("attn_prefill", &attn_prefill, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mask"),
        py::arg("is_causal"), py::arg("scale"), py::arg("return_lse"), py::arg("out"),
        py::arg("lse"));
  m.def("attn_paged_prefill", &attn_paged_prefill, py::arg("q"), py::arg("k_pool"),
        py::arg("v_pool"), py::arg("page_table"), py::arg("qo_indptr"), py::arg("kv_indptr"),
        py::arg("q_tile_to_batch"), py::arg("q_tile_to_index"), py::arg("page_size"),
        py::arg("is_causal"), py::arg("scale"), py::arg("return_lse"), py::arg("out"),
        py::arg("lse"));
}
