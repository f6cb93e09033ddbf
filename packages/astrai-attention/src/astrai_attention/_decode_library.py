# SPDX-License-Identifier: Apache-2.0
"""Decode attention as torch operators, for torch.compile only; see `_library`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._library import Results, call_attention, register_attention, run_native


def _fake(q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str) -> tuple[Tensor, Tensor]:
    """Checks what a trace can know; the compiled module checks the rest when it runs."""
    for name, tensor in (("q", q), (k_name, k), (v_name, v)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name}: expected dtype bfloat16, got {tensor.dtype}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions, got {tensor.dim()}-D {list(tensor.shape)}"
            )
    if q.shape[1] != 1:
        raise ValueError(
            f"q: expected size 1 (one token of each sequence) in dimension 1, "
            f"got shape {list(q.shape)}"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{k_name}: expected size {q.shape[3]} (head_dim of q) in dimension 3, "
            f"got shape {list(k.shape)}"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"{v_name}: expected the shape of {k_name} {list(k.shape)}, got {list(v.shape)}"
        )
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], 1), dtype=torch.float32)


def _fake_decode(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake(q, k, v, "k", "v")


def _fake_paged(q: Tensor, k_pool: Tensor, v_pool: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake(q, k_pool, v_pool, "k_pool", "v_pool")


# The operators of decode write into a workspace too.
register_attention(
    "attn_decode",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale",
    partial(run_native, "attn_decode"),
    _fake_decode,
    ("workspace",),
)
register_attention(
    "attn_paged_decode",
    "Tensor q, Tensor k_pool, Tensor v_pool, Tensor page_table, Tensor seq_lens, int page_size, "
    "float? scale",
    lambda *a: run_native("attn_paged_decode", *a[:6], None, None, a[6], False, *a[7:]),
    _fake_paged,
    ("workspace",),
)
register_attention(
    "attn_paged_decode_append",
    "Tensor q, Tensor(k!) k_pool, Tensor(v!) v_pool, Tensor page_table, Tensor seq_lens, "
    "int page_size, Tensor new_k, Tensor new_v, float? scale",
    lambda *a: run_native("attn_paged_decode", *a[:9], False, *a[9:]),
    _fake_paged,
    ("workspace",),
)


def _call(name: str, arguments: tuple[Any, ...], *results: Any) -> Results:
    q = arguments[0]
    return call_attention(name, arguments, (q.shape[0], q.shape[2], 1), *results)


def attn_decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, *results: Any
) -> Results:
    return _call("attn_decode", (q, k, v, mask, scale), *results)


def attn_paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    page_size: int,
    new_k: Tensor | None,
    new_v: Tensor | None,
    scale: float | None,
    _static_cache: bool,
    *results: Any,
) -> Results:
    # Compiled code may copy a pool or a table right before the call: nothing in it is static.
    if (new_k is None) != (new_v is None):
        raise ValueError("new_k, new_v: expected both or neither")
    cache = (q, k_pool, v_pool, page_table, seq_lens, page_size)
    if new_k is None:
        return _call("attn_paged_decode", (*cache, scale), *results)
    return _call("attn_paged_decode_append", (*cache, new_k, new_v, scale), *results)
