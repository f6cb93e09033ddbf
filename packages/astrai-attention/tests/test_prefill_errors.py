# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of prefill are named before any launch, so all of this runs without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import astrai_attention
from astrai_attention import attn_paged_prefill, attn_prefill

BF16 = torch.bfloat16
Cases = list[tuple[str, type[Exception], str, dict[str, Any]]]


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


Q, KV = ones(2, 5, 6, 64), ones(2, 9, 3, 64)
DENSE = {"q": Q, "k": KV, "v": KV}
ON_CPU = "q: expected a CUDA tensor, got one on the CPU"
MASK = r"\[batch, kv_len\], \[batch, q_len, kv_len\] or \[batch, 1, q_len, kv_len\]"


def keep(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.bool)


# What both ops check alike, of q in its last two dimensions and of the keyword arguments.
COMMON: Cases = [
    ("on the CPU", ValueError, ON_CPU, {}),
    ("scale", ValueError, ON_CPU, {"scale": 0.5}),
    ("scale is an int", ValueError, ON_CPU, {"scale": 2}),
    ("scale of 0", ValueError, r"scale: expected a number in 1e-30\.\.1e30, got 0", {"scale": 0.0}),
    ("scale below 0", ValueError, "scale: expected a number .*, got -1", {"scale": -1.0}),
    ("scale is NaN", ValueError, "scale: expected a number", {"scale": float("nan")}),
    ("scale is infinite", ValueError, "scale: expected a number", {"scale": float("inf")}),
    ("scale is huge", ValueError, "scale: expected a float, got a larger int", {"scale": 10**400}),
    ("scale is text", TypeError, "scale: expected a float, got str", {"scale": "1"}),
    ("scale is a bool", TypeError, "scale: expected a float, got bool", {"scale": True}),
    ("causal is a number", TypeError, "is_causal: expected a bool, got int", {"is_causal": 1}),
    ("causal is None", TypeError, "is_causal: expected a bool, got NoneType", {"is_causal": None}),
    ("lse is a number", TypeError, "return_lse: expected a bool, got int", {"return_lse": 0}),
    ("q is None", TypeError, r"q: expected a torch\.Tensor, got NoneType", {"q": None}),
    ("out is a number", TypeError, r"out: expected a torch\.Tensor, got int", {"out": 1}),
]

DENSE_ERRORS: Cases = [
    ("2-D mask", ValueError, ON_CPU, {"mask": keep(2, 9)}),
    ("3-D mask", ValueError, ON_CPU, {"mask": keep(2, 5, 9), "is_causal": True}),
    ("4-D mask", ValueError, ON_CPU, {"mask": keep(2, 1, 5, 9)}),
    ("expanded mask", ValueError, ON_CPU, {"mask": keep(1, 1, 9).expand(2, 5, 9)}),
    ("no queries", ValueError, ON_CPU, {"q": ones(2, 0, 6, 64)}),
    ("no keys", ValueError, ON_CPU, {"k": ones(2, 0, 3, 64), "v": ones(2, 0, 3, 64)}),
    ("slices of a projection", ValueError, ON_CPU, {"q": ones(2, 5, 12, 64)[:, :, 3:9]}),
    ("q 3-D", ValueError, r"q: expected shape \[batch, q_len, q_heads, head_dim\]", {"q": Q[0]}),
    ("q fp32", TypeError, "q: expected dtype bfloat16, got float32", {"q": Q.float()}),
    (
        "head_dim of 96",
        ValueError,
        "q: expected head_dim 32, 64, 128 or 256, got 96",
        {"q": ones(2, 5, 6, 96)},
    ),
    (
        "q_len",
        ValueError,
        r"q: expected q_len in 0\.\.1073741824, got 1073741825",
        {"q": ones(1, 1, 1, 64).expand(2, 2**30 + 1, 1, 64)},
    ),
    (
        "batch",
        ValueError,
        r"q: expected batch in 0\.\.2147483647, got 2147483648",
        {"q": ones(1, 1, 1, 64).expand(2**31, 1, 1, 64)},
    ),
    (
        "q_heads",
        ValueError,
        r"q: expected q_heads in 0\.\.2147483647, got 2147483648",
        {"q": ones(1, 1, 1, 64).expand(2, 1, 2**31, 64)},
    ),
    (
        "kv_len",
        ValueError,
        r"k: expected kv_len in 0\.\.1073741824, got 1073741825",
        {"k": ones(1, 1, 1, 64).expand(2, 2**30 + 1, 3, 64)},
    ),
    (
        "q transposed",
        ValueError,
        "q: expected stride 1 in the last dimension",
        {"q": ones(2, 5, 64, 6).mT},
    ),
    (
        "q off 16 bytes",
        ValueError,
        "q: expected rows that start on 16 bytes, got an offset of 2 bytes",
        {"q": ones(3841)[1:].view(2, 5, 6, 64)},
    ),
    (
        "rows of q off 16 bytes",
        ValueError,
        "q: expected rows that start on 16 bytes",
        {"q": ones(2, 5, 6, 68)[..., :64]},
    ),
    (
        "k of another batch",
        ValueError,
        r"k: expected size 2 \(batch of q\) in dimension 0",
        {"k": ones(1, 9, 3, 64)},
    ),
    (
        "k of another head_dim",
        ValueError,
        r"k: expected size 64 \(head_dim of q\) in dimension 3",
        {"k": ones(2, 9, 3, 128)},
    ),
    (
        "kv_heads of 4",
        ValueError,
        "k: expected kv_heads that divide q_heads = 6, got 4",
        {"k": ones(2, 9, 4, 64)},
    ),
    (
        "no kv_heads",
        ValueError,
        "k: expected kv_heads that divide q_heads = 6, got 0",
        {"k": ones(2, 9, 0, 64)},
    ),
    ("k fp16", TypeError, "k: expected dtype bfloat16, got float16", {"k": KV.half()}),
    (
        "k 3-D",
        ValueError,
        r"k: expected shape \[batch, kv_len, kv_heads, head_dim\], got 3-D",
        {"k": KV[0]},
    ),
    ("v fp64", TypeError, "v: expected dtype bfloat16, got float64", {"v": KV.double()}),
    (
        "v of another length",
        ValueError,
        r"v: expected size 9 \(that of k\) in dimension 1, got shape \[2, 8, 3, 64\]",
        {"v": ones(2, 8, 3, 64)},
    ),
    (
        "v laid out otherwise",
        ValueError,
        r"v: expected the strides of k, \[1728, 192, 64, 1\], got \[1728, 64, 576, 1\]",
        {"v": ones(2, 3, 9, 64).transpose(1, 2)},
    ),
    ("mask of bytes", TypeError, "mask: expected dtype bool, got uint8",
     {"mask": keep(2, 9).byte()}),
    ("mask added", TypeError, "mask: expected dtype bool, got float32",
     {"mask": torch.ones(2, 9)}),
    ("mask 1-D", ValueError, f"mask: expected shape {MASK}, got 1-D", {"mask": keep(9)}),
    (
        "mask of another batch",
        ValueError,
        r"mask: expected size 2 \(batch of q\) in dimension 0",
        {"mask": keep(1, 9)},
    ),
    (
        "mask of other keys",
        ValueError,
        r"mask: expected size 9 \(kv_len of k\) in dimension 1",
        {"mask": keep(2, 5)},
    ),
    (
        "mask of other queries",
        ValueError,
        r"mask: expected size 5 \(q_len of q\) in dimension 1",
        {"mask": keep(2, 1, 9)},
    ),
    (
        "mask of heads",
        ValueError,
        r"mask: expected size 1 \(all heads\) in dimension 1",
        {"mask": keep(2, 6, 5, 9)},
    ),
    (
        "mask transposed",
        ValueError,
        r"mask: expected stride 1 in the last dimension, got strides \[45, 1, 5\]",
        {"mask": keep(2, 9, 5).mT},
    ),
    ("out of another rank", ValueError, "out: expected shape of q, got 3-D", {"out": Q[0].clone()}),
    (
        "out of another shape",
        ValueError,
        r"out: expected size 6 \(that of q\) in dimension 2",
        {"out": ones(2, 5, 3, 64)},
    ),
    ("out fp32", TypeError, "out: expected dtype bfloat16", {"out": Q.float()}),
    (
        "out expanded",
        ValueError,
        "out: expected elements that share no memory",
        {"out": ones(1, 5, 6, 64).expand(2, 5, 6, 64)},
    ),
    ("out is q", ValueError, "out: expected memory of its own, .* of q", {"out": Q}),
    (
        "out is k",
        ValueError,
        "out: expected memory of its own, .* of k",
        {"k": Q, "v": ones(2, 5, 6, 64), "out": Q, "q": ones(2, 5, 6, 64)},
    ),
    (
        "out is v",
        ValueError,
        "out: expected memory of its own, .* of v",
        {"v": Q, "k": ones(2, 5, 6, 64), "out": Q, "q": ones(2, 5, 6, 64)},
    ),
    ("q requires grad", RuntimeError, "q: requires grad, and attn_prefill has no backward",
     {"q": ones(2, 5, 6, 64).requires_grad_()}),
    ("v requires grad", RuntimeError, "v: requires grad, and attn_prefill has no backward",
     {"v": ones(2, 9, 3, 64).requires_grad_()}),
]  # fmt: skip

POOL = ones(7, 16, 3, 64)
PAGED = {
    "q": ones(70, 6, 64),
    "k_pool": POOL,
    "v_pool": POOL,
    "page_table": ones(2, 4, dtype=torch.int32),
    "qo_indptr": ints(0, 65, 70),
    "kv_indptr": ints(0, 65, 70),
    "q_tile_to_batch": ints(0, 0, 1),
    "q_tile_to_index": ints(0, 1, 0),
    "page_size": 16,
}

PAGED_ERRORS: Cases = [
    ("other order", ValueError, ON_CPU, dict.fromkeys(
        ("k_pool", "v_pool"), ones(7, 3, 16, 64).transpose(1, 2))),
    ("wide table", ValueError, ON_CPU,
     {"page_table": ones(2, 9, dtype=torch.int32)[:, :4]}),
    ("page_size of 24", ValueError, r"page_size: expected a power of two in 1\.\.256, got 24",
     {"page_size": 24}),
    ("page_size of 0", ValueError, "page_size: expected a power of two", {"page_size": 0}),
    ("page_size of 512", ValueError, "page_size: expected a power of two", {"page_size": 512}),
    ("page_size of 16.0", TypeError, "page_size: expected an int, got float",
     {"page_size": 16.0}),
    ("page_size of True", TypeError, "page_size: expected an int, got bool",
     {"page_size": True}),
    ("another page_size", ValueError, r"k_pool: expected size 32 \(page_size\) in dimension 1",
     {"page_size": 32}),
    ("q 4-D", ValueError, r"q: expected shape \[total_q, q_heads, head_dim\], got 4-D",
     {"q": ones(1, 70, 6, 64)}),
    ("head_dim of 16", ValueError, "q: expected head_dim 32, 64, 128 or 256, got 16",
     {"q": ones(70, 6, 16)}),
    ("total_q", ValueError, r"q: expected total_q in 0\.\.2147483647, got 2147483648",
     {"q": ones(1, 6, 64).expand(2**31, 6, 64)}),
    ("q_heads", ValueError, r"q: expected q_heads in 0\.\.2147483647, got 2147483648",
     {"q": ones(1, 1, 64).expand(70, 2**31, 64)}),
    ("pages", ValueError, r"k_pool: expected pages in 0\.\.2147483647, got 2147483648",
     {"k_pool": ones(1, 16, 3, 64).expand(2**31, 16, 3, 64)}),
    ("pool 3-D", ValueError, r"k_pool: expected shape \[pages, page_size, kv_heads, head_dim\]",
     {"k_pool": POOL[0]}),
    ("pool of fp8", TypeError, "k_pool: expected dtype bfloat16",
     {"k_pool": POOL.to(torch.float8_e4m3fn)}),
    ("kv_heads of 4", ValueError, "k_pool: expected kv_heads that divide q_heads = 6, got 4",
     {"k_pool": ones(7, 16, 4, 64)}),
    ("fewer pages of v", ValueError, r"v_pool: expected size 7 \(that of k_pool\)",
     {"v_pool": ones(6, 16, 3, 64)}),
    ("v_pool in another order", ValueError, "v_pool: expected the strides of k_pool",
     {"v_pool": ones(7, 3, 16, 64).transpose(1, 2)}),
    ("table of int64", TypeError, "page_table: expected dtype int32, got int64",
     {"page_table": ones(2, 4, dtype=torch.int64)}),
    ("table 1-D", ValueError, r"page_table: expected shape \[batch, max_pages\], got 1-D",
     {"page_table": ints(0, 1)}),
    ("table strided", ValueError, "page_table: expected contiguous rows",
     {"page_table": ones(4, 2, dtype=torch.int32).mT}),
    ("qo_indptr of another batch", ValueError, r"qo_indptr: expected size 3 \(batch of page_table",
     {"qo_indptr": ints(0, 70)}),
    ("kv_indptr of another batch", ValueError, r"kv_indptr: expected size 3 \(batch of page_table",
     {"kv_indptr": ints(0, 70)}),
    ("kv_indptr of int64", TypeError, "kv_indptr: expected dtype int32, got int64",
     {"kv_indptr": torch.tensor([0, 65, 70])}),
    ("qo_indptr strided", ValueError, "qo_indptr: expected a contiguous tensor",
     {"qo_indptr": ints(0, 0, 65, 0, 70, 0)[::2]}),
    ("too few tiles", ValueError, "q_tile_to_batch: expected tiles for all rows of q in 2",
     {"q_tile_to_batch": ints(0), "q_tile_to_index": ints(0)}),
    ("tiles without index", ValueError,
     r"q_tile_to_index: expected size 3 \(tiles of q_tile_to_batch\)",
     {"q_tile_to_index": ints(0, 1)}),
    ("index 2-D", ValueError, r"q_tile_to_index: expected shape \[q_tiles\], got 2-D",
     {"q_tile_to_index": ints(0, 1, 0)[None]}),
    ("lists", TypeError, r"q_tile_to_batch: expected a torch\.Tensor, got list",
     {"q_tile_to_batch": [0, 0, 1]}),
    ("out of another shape", ValueError, r"out: expected size 70 \(that of q\) in dimension 0",
     {"out": ones(71, 6, 64)}),
    ("out in the pool", ValueError, "out: expected memory of its own, .* of k_pool",
     {"k_pool": (pool := ones(90, 16, 3, 64)), "v_pool": ones(90, 16, 3, 64),
      "out": pool.view(-1)[: 70 * 6 * 64].view(70, 6, 64)}),
    ("v_pool requires grad", RuntimeError,
     "v_pool: requires grad, and attn_paged_prefill has no backward",
     {"v_pool": ones(7, 16, 3, 64).requires_grad_()}),
]  # fmt: skip


def case_ids(cases: Cases) -> list[str]:
    return [case[0] for case in cases]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [case[1:] for case in COMMON + DENSE_ERRORS],
    ids=case_ids(COMMON + DENSE_ERRORS),
)
def test_dense(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        attn_prefill(**{**DENSE, **changes})


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [case[1:] for case in COMMON + PAGED_ERRORS],
    ids=case_ids(COMMON + PAGED_ERRORS),
)
def test_paged(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        attn_paged_prefill(**{**PAGED, **changes})


def test_the_mask_and_causality_may_be_positional() -> None:
    with pytest.raises(ValueError, match="q: expected a CUDA tensor"):
        attn_prefill(Q, KV, KV, keep(2, 9), True)
    with pytest.raises(TypeError, match="positional"):
        attn_prefill(Q, KV, KV, keep(2, 9), True, 0.5)


def test_fakes_give_shapes() -> None:
    with FakeTensorMode():
        q, k = torch.empty(2, 5, 6, 64, dtype=BF16), torch.empty(2, 9, 3, 64, dtype=BF16)
        ops = torch.ops.astrai_attention
        out, lse = ops.attn_prefill(q.mT.contiguous().mT, k, k, None, False, 0.5)
        assert out.shape == q.shape and out.is_contiguous() and out.dtype == BF16
        assert lse.shape == (2, 6, 5) and lse.dtype == torch.float32
        assert ops.attn_prefill_out(q, k, k, None, True, None, q.clone(), None) is None
        with pytest.raises(TypeError, match="k: expected dtype bfloat16"):
            ops.attn_prefill(q, k.float(), k, None, True, None)
        with pytest.raises(ValueError, match=r"q: expected shape \[batch, q_len, q_heads"):
            ops.attn_prefill(q[0], k, k, None, True, None)
        with pytest.raises(ValueError, match=r"v: expected four dimensions, the last of 64"):
            ops.attn_prefill(q, k, k[..., :32], None, True, None)
        pool, table = torch.empty(7, 16, 3, 64, dtype=BF16), torch.empty(2, 4, dtype=torch.int32)
        rest = (pool, pool, table, *[table[0]] * 4, 16, True, None)
        out, lse = ops.attn_paged_prefill(q[0], *rest)
        assert out.shape == (5, 6, 64) and lse.shape == (6, 5)
        with pytest.raises(ValueError, match=r"q: expected shape \[total_q, q_heads, head_dim\]"):
            ops.attn_paged_prefill(q, *rest)


@pytest.mark.parametrize("op", ["attn_prefill", "attn_paged_prefill"])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_compiled_code_calls_the_operator(op: str, lse: bool, apart: bool) -> None:
    """fullgraph tracing works; running on a CPU then ends in the op's own error."""
    arguments = DENSE if op == "attn_prefill" else PAGED

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(arguments: dict[str, Any], out: Tensor | None) -> Tensor:
        run = getattr(astrai_attention, op)
        y = run(**arguments, is_causal=True, return_lse=lse, out=out)
        return y[0] + y[1].sum() if lse else y + 1

    out = torch.empty_like(arguments["q"]) if apart else None
    with torch.no_grad(), pytest.raises(ValueError, match=ON_CPU):
        layer(arguments, out)


def test_traced_calls_do_not_lose_gradients() -> None:
    compiled = torch.compile(attn_prefill, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="an input requires grad, and this op has no backward"):
        compiled(ones(2, 5, 6, 64).requires_grad_(), KV, KV)
