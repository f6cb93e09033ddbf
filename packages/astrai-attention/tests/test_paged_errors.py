# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of attn_paged_decode are named before any launch, so this runs without a GPU.

What it shares with attn_decode (head_dim, rows on 16 bytes, scale) is in test_decode_errors.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai_attention import attn_paged_decode

BF16, INT32 = torch.bfloat16, torch.int32


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


# Two sequences of up to three pages of four tokens, in a pool of seven.
Q, K, V = ones(2, 1, 6, 32), ones(7, 4, 3, 32), ones(7, 4, 3, 32)
TABLE, LENGTHS = ones(2, 3, dtype=INT32), ones(2, dtype=INT32)
NEW_K, NEW_V, OUT = ones(2, 1, 3, 32), ones(2, 1, 3, 32), ones(2, 1, 6, 32)
ARGUMENTS: dict[str, Any] = {
    "q": Q,
    "k_pool": K,
    "v_pool": V,
    "page_table": TABLE,
    "seq_lens": LENGTHS,
    "page_size": 4,
}
NEW = {"new_k": NEW_K, "new_v": NEW_V}
ALL = {**ARGUMENTS, **NEW, "out": OUT}
DEVICE = "q: expected a CUDA tensor, got one on the CPU"


def pools(*shape: int) -> dict[str, Tensor]:
    return {"k_pool": ones(*shape), "v_pool": ones(*shape)}


def heads_first() -> Tensor:
    return ones(7, 3, 4, 32).transpose(1, 2)


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("new token", NEW),
    ("static cache", {**NEW, "static_cache": True}),
    ("everything", {**NEW, "scale": 0.5, "return_lse": True, "out": OUT}),
    ("heads before tokens", {**NEW, "k_pool": heads_first(), "v_pool": heads_first()}),
    ("k and v of one tensor", dict(zip(("k_pool", "v_pool"), ones(2, 7, 4, 3, 32), strict=True))),
    ("slice of a wider table", {"page_table": ones(2, 9, dtype=INT32)[:, 2:5]}),
    ("no pages of a sequence", {"page_table": ones(2, 0, dtype=INT32)}),
    ("no pages", pools(0, 4, 3, 32)),
    ("pages of one token", {**pools(7, 1, 3, 32), "page_size": 1}),
    ("pages of 256 tokens", {**pools(7, 256, 3, 32), "page_size": 256}),
    (
        "no sequences",
        {
            "q": ones(0, 1, 6, 32),
            "page_table": ones(0, 3, dtype=INT32),
            "seq_lens": ones(0, dtype=INT32),
        },
    ),
    ("new token of a projection", {"new_k": ones(2, 1, 6, 32)[:, :, :3], "new_v": NEW_V}),
]


@pytest.mark.parametrize("changes", [c[1] for c in GOOD], ids=[c[0] for c in GOOD])
def test_the_device_is_checked_last(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=DEVICE):
        attn_paged_decode(**{**ARGUMENTS, **changes})


Case = tuple[str, type[Exception], str, dict[str, Any]]

POOLS: list[Case] = [
    ("q fp32", TypeError, "q: expected dtype bfloat16", {"q": Q.float()}),
    ("q 3-D", ValueError, r"q: expected shape \[batch, 1, q_heads, head_dim\]", {"q": Q[0]}),
    ("k fp16", TypeError, "k_pool: expected dtype bfloat16, got float16", {"k_pool": K.half()}),
    ("v fp32", TypeError, "v_pool: expected dtype bfloat16, got float32", {"v_pool": V.float()}),
    (
        "k 3-D",
        ValueError,
        r"k_pool: expected shape \[pages, page_size, kv_heads, head_dim\], got 3-D",
        {"k_pool": K.flatten(0, 1)},
    ),
    (
        "v 3-D",
        ValueError,
        r"v_pool: expected shape \[pages, page_size, kv_heads, head_dim\], got 3-D",
        {"v_pool": V.flatten(0, 1)},
    ),
    (
        "k of another head_dim",
        ValueError,
        r"k_pool: expected size 32 \(head_dim of q\) in dimension 3",
        pools(7, 4, 3, 64),
    ),
    (
        "KV heads that do not divide",
        ValueError,
        "k_pool: expected kv_heads that divide the 6 heads of q, got 4",
        pools(7, 4, 4, 32),
    ),
    (
        "pages of another size",
        ValueError,
        r"k_pool: expected size 4 \(page_size\) in dimension 1, got shape \[7, 8, 3, 32\]",
        pools(7, 8, 3, 32),
    ),
    (
        "too many pages",
        ValueError,
        r"k_pool: expected pages in 0\.\.2147483647, got 2147483648",
        {"k_pool": K[:1].expand(2**31, 4, 3, 32)},
    ),
    *(
        (
            f"v {shape}",
            ValueError,
            rf"v_pool: expected size {size} \(that of k_pool\)",
            {"v_pool": ones(*shape)},
        )
        for size, shape in ((7, (8, 4, 3, 32)), (4, (7, 8, 3, 32)), (3, (7, 4, 6, 32)))
    ),
    (
        "strides of v unlike k",
        ValueError,
        r"v_pool: expected the strides of k_pool, \[384, 96, 32, 1\], got \[384, 32, 128, 1\]",
        {"v_pool": heads_first()},
    ),
    (
        "rows of k off 16 bytes",
        ValueError,
        "k_pool: expected rows that start on 16 bytes",
        {"k_pool": ones(7, 4, 3, 36)[..., :32]},
    ),
    (
        "v transposed",
        ValueError,
        "v_pool: expected stride 1 in the last dimension",
        {"v_pool": ones(7, 4, 32, 3).mT},
    ),
    *(
        (
            f"page_size {size}",
            ValueError,
            rf"page_size: expected a power of two in 1\.\.256, got {size}",
            {"page_size": size},
        )
        for size in (-4, 0, 3, 512)
    ),
]

TABLES: list[Case] = [
    (
        "table int64",
        TypeError,
        "page_table: expected dtype int32, got int64",
        {"page_table": TABLE.long()},
    ),
    (
        "table 1-D",
        ValueError,
        r"page_table: expected shape \[batch, pages of a sequence\], got 1-D",
        {"page_table": TABLE[0]},
    ),
    (
        "table of another batch",
        ValueError,
        r"page_table: expected size 2 \(batch of q\) in dimension 0, got shape \[1, 3\]",
        {"page_table": TABLE[:1]},
    ),
    (
        "table of too many tokens",
        ValueError,
        r"page_table: expected pages of a sequence in 0\.\.268435456, got 268435457",
        {"page_table": ones(2, 1, dtype=INT32).expand(2, 2**28 + 1)},
    ),
    (
        "table transposed",
        ValueError,
        r"page_table: expected contiguous rows .* got strides \[1, 2\]",
        {"page_table": ones(3, 2, dtype=INT32).mT},
    ),
    (
        "table expanded",
        ValueError,
        r"page_table: expected contiguous rows .* got strides \[0, 1\]",
        {"page_table": TABLE[:1].expand(2, 3)},
    ),
    (
        "lengths int64",
        TypeError,
        "seq_lens: expected dtype int32, got int64",
        {"seq_lens": LENGTHS.long()},
    ),
    (
        "lengths 2-D",
        ValueError,
        r"seq_lens: expected shape \[batch\], got 2-D",
        {"seq_lens": LENGTHS[None]},
    ),
    (
        "lengths of another batch",
        ValueError,
        r"seq_lens: expected size 2 \(batch of q\) in dimension 0",
        {"seq_lens": ones(3, dtype=INT32)},
    ),
    (
        "lengths strided",
        ValueError,
        "seq_lens: expected a contiguous tensor",
        {"seq_lens": ones(4, dtype=INT32)[::2]},
    ),
]

NEW_TOKENS: list[Case] = [
    ("new_k alone", ValueError, "new_k, new_v: expected both or neither", {"new_k": NEW_K}),
    ("new_v alone", ValueError, "new_k, new_v: expected both or neither", {"new_v": NEW_V}),
    *(
        (f"{name} {what}", error, f"{name}: expected {message}", {**NEW, name: x})
        for name in ("new_k", "new_v")
        for what, error, message, x in (
            ("fp32", TypeError, "dtype bfloat16, got float32", NEW_K.float()),
            ("3-D", ValueError, r"shape \[batch, 1, kv_heads, head_dim\], got 3-D", NEW_K[0]),
            ("of another batch", ValueError, r"size 2 \(batch of q\)", ones(1, 1, 3, 32)),
            ("of two tokens", ValueError, r"size 1 \(one token of each seq", ones(2, 2, 3, 32)),
            ("of other heads", ValueError, r"size 3 \(kv_heads of k_pool\)", ones(2, 1, 6, 32)),
            ("of another head_dim", ValueError, r"size 32 \(head_dim of q\)", ones(2, 1, 3, 64)),
            ("transposed", ValueError, "stride 1 in the last", ones(2, 1, 32, 3).mT),
            ("off 16 bytes", ValueError, "rows that start on 16", ones(2, 1, 3, 36)[..., :32]),
            ("in k_pool", ValueError, "memory of its own, .* of k_pool", K[5:, :1]),
            ("in v_pool", ValueError, "memory of its own, .* of v_pool", V[:2, :1]),
            ("a number", TypeError, "a torch.Tensor, got int", 1),
        )
    ),
    (
        "k expanded and written",
        ValueError,
        "k_pool: expected elements that share no memory",
        {**NEW, "k_pool": K[:1].expand(7, 4, 3, 32), "v_pool": V[:1].expand(7, 4, 3, 32)},
    ),
    (
        "k and v the same and written",
        ValueError,
        "k_pool: expected memory of its own, .* of v_pool",
        {**NEW, "v_pool": K},
    ),
    (
        "q in the pool that is written",
        ValueError,
        "k_pool: expected memory of its own, .* of q",
        {**NEW, "q": K[:1, :2].view(2, 1, 3, 32)},
    ),
    (
        "table in the pool that is written",
        ValueError,
        "v_pool: expected memory of its own, .* of page_table",
        {**NEW, "page_table": V.view(-1)[:12].view(INT32).view(2, 3)},
    ),
    (
        "lengths in the pool that is written",
        ValueError,
        "k_pool: expected memory of its own, .* of seq_lens",
        {**NEW, "seq_lens": K.view(-1)[:4].view(INT32)},
    ),
]

OUTS: list[Case] = [
    ("out fp32", TypeError, "out: expected dtype bfloat16", {"out": OUT.float()}),
    ("out of other heads", ValueError, r"out: expected size 6 \(that of q\)", {"out": NEW_K}),
    *(
        (f"out in {of}", ValueError, f"out: expected memory of its own, .* of {of}", {**NEW, **x})
        for of, x in (
            ("q", {"out": Q}),
            ("k_pool", {"out": K[:1].view(2, 1, 6, 32)}),
            ("v_pool", {"out": V[-1:].view(2, 1, 6, 32)}),
            ("page_table", {"out": OUT, "page_table": OUT.view(-1)[:12].view(INT32).view(2, 3)}),
            ("seq_lens", {"out": OUT, "seq_lens": OUT.view(-1)[-4:].view(INT32)}),
            ("new_k", {"out": OUT, "new_k": OUT[:, :, :3]}),
            ("new_v", {"out": OUT, "new_v": OUT[:, :, 3:]}),
        )
    ),
    ("return_lse", TypeError, "return_lse: expected a bool, got int", {"return_lse": 0}),
    ("static_cache", TypeError, "static_cache: expected a bool, got int", {"static_cache": 1}),
    ("scale", ValueError, "scale: expected a number in", {"scale": math.nan}),
    ("page_size a bool", TypeError, "page_size: expected an int, got bool", {"page_size": True}),
    ("page_size a float", TypeError, "page_size: expected an int, got float", {"page_size": 4.0}),
    ("scale text", TypeError, "scale: expected a float, got str", {"scale": "1"}),
    ("k None", TypeError, "k_pool: expected a torch.Tensor, got NoneType", {"k_pool": None}),
    ("table None", TypeError, "page_table: expected a torch.Tensor", {"page_table": None}),
    ("lengths a list", TypeError, "seq_lens: expected a torch.Tensor", {"seq_lens": [1, 1]}),
    ("v meta", TypeError, "v_pool: expected a dense tensor", {"v_pool": V.to("meta")}),
    ("table meta", TypeError, "page_table: expected a dense", {"page_table": TABLE.to("meta")}),
]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [case[1:] for case in (*POOLS, *TABLES, *NEW_TOKENS, *OUTS)],
    ids=[case[0] for case in (*POOLS, *TABLES, *NEW_TOKENS, *OUTS)],
)
def test_errors(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        attn_paged_decode(**{**ARGUMENTS, **changes})


def test_the_page_size_must_be_named() -> None:
    arguments = {name: x for name, x in ARGUMENTS.items() if name != "page_size"}
    with pytest.raises(TypeError, match="page_size"):
        attn_paged_decode(**arguments)


@pytest.mark.parametrize("name", [name for name in ALL if name != "page_size"])
def test_fake_tensors_are_refused_before_their_memory_is_looked_at(name: str) -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(ALL[name])
    with pytest.raises(TypeError, match=rf"{name}: expected a plain torch\.Tensor, got a Fake"):
        attn_paged_decode(**{**ALL, name: fake})


@pytest.mark.parametrize("name", ["q", "k_pool", "v_pool", "new_k", "new_v", "out"])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, Tensor.requires_grad_])
def test_gradients_are_not_lost(name: str, kind: Callable[[Tensor], Tensor]) -> None:
    arguments = {**ALL, name: kind(ALL[name].clone())}
    message = f"{name}: requires grad, and attn_paged_decode has no backward"
    with pytest.raises(RuntimeError, match=message):
        attn_paged_decode(**arguments)
    with torch.no_grad(), pytest.raises(ValueError, match=DEVICE):
        attn_paged_decode(**arguments)
