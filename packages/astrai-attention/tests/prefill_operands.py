# SPDX-License-Identifier: Apache-2.0
"""Prefill's operands in hostile memory, and the comparison of its results with float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_attention import attn_paged_prefill, attn_prefill, q_tile_schedule
from kernelkit import reference
from kernelkit.compare import assert_close_to_reference
from kernelkit.poison import guarded_output, misaligned, poison_

DEVICE = "cuda"
BF16 = torch.bfloat16
HUGE = 2**31 - 1  # a page id that nothing may look at


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(BF16)


def hostile(x: Tensor) -> Tensor:
    """The same values, NaN before, between and after the rows."""
    return misaligned(x, 8, row_padding=8)


def torch_bf16(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None) -> Tensor:
    """torch's own bf16 attention; zeros for queries that see nothing."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    nothing = ~seen.any(-1, keepdim=True)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | nothing, scale=scale)
    return y.masked_fill(nothing, 0).transpose(1, 2)


def visible(q_len: int, kv_len: int, mask: Tensor | None, is_causal: bool) -> Tensor:
    """``[B or 1, 1, q_len, kv_len]``."""
    seen = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool)
    if is_causal:
        seen = seen.tril(kv_len - q_len)
    if mask is not None:
        rows = 1 if mask.dim() == 2 else q_len
        seen = seen & mask.reshape(len(mask), 1, rows, kv_len)
    return seen


def check_values(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> None:
    # On the CPU: torch's own kernels are not all clean under the sanitizer.
    out, lse, q, k, v = (x.cpu() for x in (out, lse, q, k, v))
    mask = None if mask is None else mask.cpu()
    exact, exact_lse = reference.attention(q, k, v, mask=mask, is_causal=is_causal, scale=scale)
    if k.shape[1]:
        baseline = torch_bf16(q, k, v, visible(q.shape[1], k.shape[1], mask, is_causal), scale)
    else:
        baseline = torch.zeros_like(q)
    assert_close_to_reference(out, exact, baseline)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


def check_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> None:
    """Values and surroundings, with and without `lse`."""
    out = guarded_output(q.shape, device=DEVICE)
    returned, lse = attn_prefill(
        q, k, v, mask, is_causal, scale=scale, return_lse=True, out=out.tensor
    )
    assert returned is out.tensor
    out.check()
    check_values(out.tensor, lse, q, k, v, mask=mask, is_causal=is_causal, scale=scale)
    alone = attn_prefill(q, k, v, mask, is_causal, scale=scale)
    assert alone.is_contiguous() and torch.equal(alone, out.tensor)


@dataclass
class Paged:
    """A ragged batch over pools: NaN in every unused cell, `HUGE` in every unused table entry."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    page_table: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    q_tile_to_batch: Tensor
    q_tile_to_index: Tensor
    page_size: int
    keys: list[tuple[Tensor, Tensor]]  # k and v of each sequence, [1, length, kv_heads, head_dim]

    @property
    def operands(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "keys"}

    def sequences(self) -> list[tuple[int, int, Tensor, Tensor]]:
        ends = self.qo_indptr.tolist()
        return [(*rows, *kv) for rows, kv in zip(pairwise(ends), self.keys, strict=True)]


def indices(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def paged(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    heads_first: bool = False,
) -> Paged:
    needed = [-(-length // page_size) for length in kv_lens]
    pages = sum(needed) + 2
    shape = (pages, kv_heads, page_size) if heads_first else (pages, page_size, kv_heads)
    pools = [poison_(torch.empty(*shape, head_dim, device=DEVICE, dtype=BF16)) for _ in range(2)]
    if heads_first:
        pools = [pool.transpose(1, 2) for pool in pools]
    order = torch.randperm(pages).tolist()
    table = torch.full((len(q_lens), max(needed, default=0) + 3), HUGE, dtype=torch.int32)
    keys = []
    for index, (length, count) in enumerate(zip(kv_lens, needed, strict=True)):
        own = [order.pop() for _ in range(count)]
        table[index, :count] = torch.tensor(own, dtype=torch.int32)
        k, v = randn(1, length, kv_heads, head_dim), randn(1, length, kv_heads, head_dim)
        for number, page in enumerate(own):
            rows = slice(number * page_size, min((number + 1) * page_size, length))
            for pool, x in zip(pools, (k, v), strict=True):
                pool[page, : rows.stop - rows.start] = x[0, rows]
        keys.append((k, v))
    qo_indptr, to_batch, to_index = q_tile_schedule(q_lens)
    kv_indptr = [sum(kv_lens[:i]) for i in range(len(kv_lens) + 1)]
    return Paged(
        randn(sum(q_lens), q_heads, head_dim),
        *pools,
        table.to(DEVICE),
        *(indices(x) for x in (qo_indptr, kv_indptr, to_batch, to_index)),
        page_size,
        keys,
    )


def check_paged(case: Paged, *, is_causal: bool = True, scale: float | None = None) -> None:
    """Each sequence against float64."""
    out = guarded_output(case.q.shape, device=DEVICE)
    returned, lse = attn_paged_prefill(
        **case.operands, is_causal=is_causal, scale=scale, return_lse=True, out=out.tensor
    )
    assert returned is out.tensor
    out.check()
    for begin, end, k, v in case.sequences():
        if begin == end:
            continue
        rows = slice(begin, end)
        check_values(
            out.tensor[None, rows], lse[None, :, rows], case.q[None, rows], k, v,
            is_causal=is_causal, scale=scale,
        )  # fmt: skip
    alone = attn_paged_prefill(**case.operands, is_causal=is_causal, scale=scale)
    assert alone.is_contiguous() and torch.equal(alone, out.tensor)
