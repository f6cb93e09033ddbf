# SPDX-License-Identifier: Apache-2.0
"""Decode attention as torch operators, for torch.compile only; see `_library`.

Each returns the log-sum-exp whether it is asked for or not: a float of each query head costs
nothing, and there is one operator for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._library import refuse_grad, register
from ._native import native

Result = Tensor | tuple[Tensor, Tensor]


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


def _register_pair(
    name: str,
    arguments: str,
    run: Callable[..., tuple[Tensor, Tensor]],
    fake: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """An operator that returns a new output, and one that writes into its last argument."""
    register(
        f"{name}({arguments}) -> (Tensor, Tensor)",
        lambda *args: run(*args, None),
        fake,
        torch.Tag.needs_exact_strides,
    )
    register(
        f"{name}_out({arguments}, Tensor(z!) out) -> Tensor",
        lambda *args: run(*args)[1],
        lambda *args: fake(*args)[1],
        torch.Tag.needs_exact_strides,
    )


# V has the strides of K, and rows start on 16 bytes: the order of the strides is not enough.
_register_pair(
    "attn_decode",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale",
    lambda q, k, v, mask, scale, out: native.attn_decode(q, k, v, mask, scale, True, out),
    _fake_decode,
)
_register_pair(
    "attn_paged_decode",
    "Tensor q, Tensor k_pool, Tensor v_pool, Tensor page_table, Tensor seq_lens, int page_size, "
    "float? scale",
    lambda q, k, v, table, lengths, size, scale, out: native.attn_paged_decode(
        q, k, v, table, lengths, size, None, None, scale, True, out
    ),
    _fake_paged,
)
_register_pair(
    "attn_paged_decode_append",
    "Tensor q, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor page_table, Tensor seq_lens, "
    "int page_size, Tensor new_k, Tensor new_v, float? scale",
    lambda q, k, v, table, lengths, size, new_k, new_v, scale, out: native.attn_paged_decode(
        q, k, v, table, lengths, size, new_k, new_v, scale, True, out
    ),
    _fake_paged,
)


def _call(op: str, arguments: tuple[Any, ...], return_lse: bool, out: Tensor | None) -> Result:
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: expected a bool, got {type(return_lse).__name__}")
    if out is None:
        out, lse = getattr(torch.ops.astrai_attention, op)(*arguments)
    else:
        lse = getattr(torch.ops.astrai_attention, f"{op}_out")(*arguments, out)
    return (out, lse) if return_lse else out


def attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    return_lse: bool,
    out: Tensor | None,
) -> Result:
    refuse_grad(q, k, v, out)
    return _call("attn_decode", (q, k, v, mask, scale), return_lse, out)


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
    return_lse: bool,
    out: Tensor | None,
) -> Result:
    refuse_grad(q, k_pool, v_pool, new_k, new_v, out)
    if (new_k is None) != (new_v is None):
        raise ValueError("new_k, new_v: expected both or neither")
    cache = (q, k_pool, v_pool, page_table, seq_lens, page_size)
    if new_k is None:
        return _call("attn_paged_decode", (*cache, scale), return_lse, out)
    return _call("attn_paged_decode_append", (*cache, new_k, new_v, scale), return_lse, out)
