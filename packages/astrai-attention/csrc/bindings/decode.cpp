// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <optional>

#include "astrai/host/torch_exchange.h"
#include "attention/arrivals.h"
#include "attention/decode_params.h"
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

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr int64_t kMaxHeads = 65535;

// q: [batch, 1, q_heads, head_dim].
struct Queries {
  explicit Queries(const TensorView& q) {
    q.expect_dtype(DType::kBFloat16)
        .expect_rank(4, 4, "[batch, 1, q_heads, head_dim]")
        .expect_size(1, 1, "one token of each sequence")
        .expect_size_in(0, 0, kMaxInt, "batch")
        .expect_size_in(2, 1, kMaxHeads, "q_heads");
    attention::check_head_dim(q);
    q.expect_aligned_rows();
    head_dim = q.size(3);
    batch = q.size(0);
    heads = q.size(2);
  }
  int64_t batch, heads, head_dim;
};

void check_kv(const TensorView& x, const Queries& q, const char* layout) {
  x.expect_dtype(DType::kBFloat16)
      .expect_rank(4, 4, layout)
      .expect_size(3, q.head_dim, "head_dim of q")
      .expect_size_in(2, 1, kMaxHeads, "kv_heads")
      .expect_aligned_rows();
  if (q.heads % x.size(2) != 0)
    throw ValueError(concat(x.name(), ": expected kv_heads that divide the ", q.heads,
                            " heads of q, got ", x.size(2)));
}

attention::DecodeMask mask_of(const TensorView& mask, int64_t batch, int64_t length) {
  mask.expect_dtype(DType::kBool)
      .expect_rank(2, 4, "[batch, kv_len], [batch, 1, kv_len] or [batch, 1, 1, kv_len]")
      .expect_size(0, batch, "batch of q")
      .expect_size(-1, length, "kv_len of k");
  for (int i = 1; i < mask.rank() - 1; ++i) mask.expect_size(i, 1, "one query of each sequence");
  return {mask.data<uint8_t>(), mask.stride(0), mask.stride(-1)};
}

// What an op writes into, given or to be allocated.
struct Results {
  Results(py::handle out_, py::handle lse_, py::handle workspace_, bool with_lse,
          const TensorView& q, const Queries& shape)
      : out_(out_),
        lse_(lse_),
        with_lse(with_lse || !lse_.is_none()),
        out(attention::check_out(out_, q)),
        lse(attention::check_lse(lse_, {shape.batch, shape.heads, 1}, "[batch, q_heads, 1]")) {
    if (workspace_.is_none()) return;
    workspace.emplace(TorchExchange::get().view("workspace", workspace_));
    workspace->expect_dtype(DType::kUInt8)
        .expect_rank(1, 1, "[bytes]")
        .expect_contiguous()
        .expect_aligned_rows();
  }

  py::handle out_, lse_;
  bool with_lse;
  std::optional<TensorView> out, lse, workspace;
};

// What both ops do once the operands are checked.
template <class Params>
py::object run(Params& params, py::handle q_, const TensorView& q, const Queries& shape,
               int64_t kv_heads, int64_t max_length, bool is_exact, const Results& given) {
  const TorchExchange& torch = TorchExchange::get();
  const py::object result =
      given.out ? py::reinterpret_borrow<py::object>(given.out_) : torch.empty_like(q_);
  py::object lse = py::reinterpret_borrow<py::object>(given.lse_);
  if (given.with_lse && !given.lse) lse = torch.new_empty_fp32(q_, {shape.batch, shape.heads, 1});
  if (q.numel() == 0) return attention::answer(result, lse);
  const TensorView out = given.out ? *given.out : torch.view("out", result);

  const int device = q.device_index();
  const attention::DecodeProblem problem{shape.batch,    shape.heads, kv_heads,
                                         shape.head_dim, max_length,  is_exact};
  const attention::DecodePlan plan =
      attention::plan_decode(problem, attention::device_info(device));
  params.q = q.data<Bf16>();
  params.out = out.data<Bf16>();
  if (given.with_lse)
    params.lse = (given.lse ? *given.lse : torch.view("lse", lse)).template data<float>();
  params.q_stride = {q.stride(0), q.stride(2)};
  params.out_stride = {out.stride(0), out.stride(2)};
  py::object workspace;
  void* memory = nullptr;
  if (given.workspace) {
    if (given.workspace->numel() < plan.workspace_bytes)
      throw ValueError(concat("workspace: expected at least ", plan.workspace_bytes,
                              " bytes (see decode_workspace_size), got ",
                              given.workspace->numel()));
    memory = given.workspace->template data<void>();
  } else if (plan.workspace_bytes > 0) {
    workspace = torch.new_empty_fp32(q_, {plan.workspace_bytes / 4});
    memory = torch.view("workspace", workspace).template data<void>();
  }
  attention::set_plan(params, problem, plan, memory);
  astrai::DeviceGuard guard(device);
  attention::launch_decode(params, plan, static_cast<int>(shape.head_dim), device,
                           torch.current_stream(q.device()));
  if (given.out) torch.mark_written(given.out_);
  if (given.lse) torch.mark_written(given.lse_);
  return attention::answer(result, lse);
}

py::object attn_decode(py::handle q_, py::handle k_, py::handle v_, py::handle mask_,
                       py::handle scale, py::handle return_lse, py::handle out_, py::handle lse_,
                       py::handle workspace_) {
  const TorchExchange& torch = TorchExchange::get();
  const bool with_lse = astrai::as_bool("return_lse", return_lse);
  const TensorView q = torch.view("q", q_);
  const TensorView k = torch.view("k", k_);
  const TensorView v = torch.view("v", v_);
  const Queries shape(q);
  check_kv(k, shape, "[batch, kv_len, kv_heads, head_dim]");
  k.expect_size(0, shape.batch, "batch of q").expect_size_in(1, 0, kMaxLength, "kv_len");
  attention::check_v(v, k, "[batch, kv_len, kv_heads, head_dim]");
  attention::DecodeParams<attention::ContigKv> params{};
  std::optional<TensorView> mask;
  if (!mask_.is_none()) {
    mask.emplace(torch.view("mask", mask_));
    params.mask = mask_of(*mask, shape.batch, k.size(1));
  }
  params.scale_log2 = attention::scale_log2(scale, shape.head_dim);
  const Results given(out_, lse_, workspace_, with_lse, q, shape);
  const TensorView* const out = astrai::address(given.out);
  const TensorView* const lse = astrai::address(given.lse);
  const TensorView* const workspace = astrai::address(given.workspace);
  attention::expect_apart({out, lse, workspace}, {&q, &k, &v, astrai::address(mask)});
  torch.refuse_grad("attn_decode", {{"q", q_}, {"k", k_}, {"v", v_}, {"out", out_}, {"lse", lse_}});
  astrai::expect_one_gpu(q, {&k, &v, astrai::address(mask), out, lse, workspace});
  params.kv = {k.data<Bf16>(), v.data<Bf16>(), k.stride(0),
               k.stride(1),    k.stride(2),    static_cast<int>(k.size(1))};
  return run(params, q_, q, shape, k.size(2), k.size(1), /*is_exact=*/true, given);
}

py::object attn_paged_decode(py::handle q_, py::handle k_, py::handle v_, py::handle table_,
                             py::handle lengths_, py::handle page_size_, py::handle new_k_,
                             py::handle new_v_, py::handle scale, py::handle static_cache,
                             py::handle return_lse, py::handle out_, py::handle lse_,
                             py::handle workspace_) {
  const TorchExchange& torch = TorchExchange::get();
  const bool with_lse = astrai::as_bool("return_lse", return_lse);
  const int64_t page_size = attention::as_page_size(page_size_);
  const TensorView q = torch.view("q", q_);
  const TensorView k = torch.view("k_pool", k_);
  const TensorView v = torch.view("v_pool", v_);
  const TensorView table = torch.view("page_table", table_);
  const TensorView lengths = torch.view("seq_lens", lengths_);
  const Queries shape(q);
  check_kv(k, shape, "[pages, page_size, kv_heads, head_dim]");
  k.expect_size(1, page_size, "page_size").expect_size_in(0, 0, kMaxInt, "pages");
  attention::check_v(v, k, "[pages, page_size, kv_heads, head_dim]");
  const int64_t kv_heads = k.size(2);
  table.expect_dtype(DType::kInt32)
      .expect_rank(2, 2, "[batch, pages of a sequence]")
      .expect_size(0, shape.batch, "batch of q")
      .expect_size_in(1, 0, kMaxLength / page_size, "pages of a sequence")
      .expect_rows_contiguous();
  lengths.expect_dtype(DType::kInt32)
      .expect_rank(1, 1, "[batch]")
      .expect_size(0, shape.batch, "batch of q")
      .expect_contiguous();
  if (new_k_.is_none() != new_v_.is_none())
    throw ValueError("new_k, new_v: expected both or neither");
  std::optional<TensorView> new_k, new_v;
  attention::DecodeParams<attention::PagedKv> params{};
  params.scale_log2 = attention::scale_log2(scale, shape.head_dim);
  params.static_cache = astrai::as_bool("static_cache", static_cache);
  const Results given(out_, lse_, workspace_, with_lse, q, shape);
  const TensorView* const out = astrai::address(given.out);
  const TensorView* const lse = astrai::address(given.lse);
  const TensorView* const workspace = astrai::address(given.workspace);
  if (!new_k_.is_none()) {
    new_k.emplace(torch.view("new_k", new_k_));
    new_v.emplace(torch.view("new_v", new_v_));
    for (const TensorView* fresh : {&*new_k, &*new_v}) {
      fresh->expect_dtype(DType::kBFloat16)
          .expect_rank(4, 4, "[batch, 1, kv_heads, head_dim]")
          .expect_size(0, shape.batch, "batch of q")
          .expect_size(1, 1, "one token of each sequence")
          .expect_size(2, kv_heads, "kv_heads of k_pool")
          .expect_size(3, shape.head_dim, "head_dim of q")
          .expect_aligned_rows()
          .expect_disjoint(k)
          .expect_disjoint(v);
    }
    // The pools are written then.
    k.expect_distinct_elements().expect_disjoint(v);
    v.expect_distinct_elements();
    for (const TensorView* pool : {&k, &v})
      for (const TensorView* input : {&q, &table, &lengths}) pool->expect_disjoint(*input);
  }
  attention::expect_apart({out, lse, workspace}, {&q, &k, &v, &table, &lengths,
                                                  astrai::address(new_k), astrai::address(new_v)});
  torch.refuse_grad("attn_paged_decode", {{"q", q_},
                                          {"k_pool", k_},
                                          {"v_pool", v_},
                                          {"new_k", new_k_},
                                          {"new_v", new_v_},
                                          {"out", out_},
                                          {"lse", lse_}});
  astrai::expect_one_gpu(q, {&k, &v, &table, &lengths, astrai::address(new_k),
                             astrai::address(new_v), out, lse, workspace});
  if (new_k)
    params.fresh = {new_k->data<Bf16>(),
                    new_v->data<Bf16>(),
                    {new_k->stride(0), new_k->stride(2)},
                    {new_v->stride(0), new_v->stride(2)}};
  int page_shift = 0;
  while (page_size >> page_shift > 1) ++page_shift;
  params.kv = {k.data<Bf16>(),   v.data<Bf16>(),    k.stride(0),     k.stride(1),
               k.stride(2),      table.data<int>(), table.stride(0), lengths.data<int>(),
               /*ragged=*/false, page_shift};
  py::object made =
      run(params, q_, q, shape, kv_heads, table.size(1) * page_size, /*is_exact=*/false, given);
  if (new_k) {
    torch.mark_written(k_);
    torch.mark_written(v_);
  }
  return made;
}

py::dict plan_decode(int64_t batch, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                     int64_t max_length, bool is_exact, const astrai::DeviceInfo& device) {
  const attention::DecodePlan plan =
      attention::plan_decode({batch, q_heads, kv_heads, head_dim, max_length, is_exact}, device);
  py::dict result;
  result["body"] = attention::kBody;
  result["head_groups"] = plan.head_groups;
  result["parts"] = plan.parts;
  result["grid"] = plan.grid;
  result["splits"] = plan.splits;
  result["merges_inside"] = plan.merges_inside;
  result["merge_grid"] = plan.merge_grid;
  result["workspace_bytes"] = plan.workspace_bytes;
  result["warps"] = plan.warps;
  result["smem_bytes"] = plan.smem_bytes;
  result["programmatic"] = plan.programmatic;
  return result;
}

}  // namespace

void bind_decode(py::module_& m) {
  m.def("plan_decode", &plan_decode, py::kw_only(), py::arg("batch"), py::arg("q_heads"),
        py::arg("kv_heads"), py::arg("head_dim"), py::arg("max_length"), py::arg("is_exact"),
        py::arg("device"));
  m.def("arrivals_held", &attention::arrivals_held, py::arg("device"));
  m.def("attn_decode", &attn_decode, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mask"),
        py::arg("scale"), py::arg("return_lse"), py::arg("out"), py::arg("lse"),
        py::arg("workspace"));
  m.def("attn_paged_decode", &attn_paged_decode, py::arg("q"), py::arg("k_pool"), py::arg("v_pool"),
        py::arg("page_table"), py::arg("seq_lens"), py::arg("page_size"), py::arg("new_k"),
        py::arg("new_v"), py::arg("scale"), py::arg("static_cache"), py::arg("return_lse"),
        py::arg("out"), py::arg("lse"), py::arg("workspace"));
}
