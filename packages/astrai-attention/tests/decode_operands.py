# SPDX-License-Identifier: Apache-2.0
"""Operands, references and checks of the tests of decode attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelkit import reference
from kernelkit.compare import assert_close_to_reference
from kernelkit.poison import poison_

BF16, INT32 = torch.bfloat16, torch.int32
# What a page table may hold where no page is in use.
NO_PAGE = 2**30
# Of more elements, references are computed on the GPU. torch's own kernels are not all clean under
# the sanitizer, whose tests stay below.
HOST_ELEMENTS = 2_000_000


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float | None
) -> Tensor:
    """What torch gives in bf16."""
    heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    mask = None if keep is None else keep[:, None, None]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def check_values(
    result: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Fails unless output and log-sum-exp are those of K and V where `keep` says so."""
    out, lse = result
    assert out.shape == q.shape and out.dtype == BF16
    assert lse.shape == (q.shape[0], q.shape[2], 1) and lse.dtype == torch.float32
    if k.numel() <= HOST_ELEMENTS:
        out, lse, q, k, v = (x.cpu() for x in (out, lse, q, k, v))
        keep = None if keep is None else keep.cpu()
    exact, exact_lse = reference.attention(q, k, v, mask=keep, scale=scale)
    assert_close_to_reference(out, exact, torch_attention(q, k, v, keep, scale))
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that holds for NaN too."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@dataclass
class Paged:
    """Sequences in pages in random order; NaN past their lengths, and ids that lead nowhere."""

    k_pool: Tensor
    v_pool: Tensor
    page_table: Tensor
    seq_lens: Tensor
    page_size: int
    k: Tensor  # the same tokens, contiguous: [batch, longest, kv_heads, head_dim]
    v: Tensor
    keep: Tensor  # which of them there are: [batch, longest]
    new: dict[str, Tensor]  # the newest tokens, if they are not in the pool yet
    filled: tuple[Tensor, Tensor]  # the pools as they have to be after the call

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("k_pool", "v_pool", "page_table", "seq_lens", "page_size")
        return {name: getattr(self, name) for name in names} | self.new


def _pool(dense: Tensor, place: Tensor, pages: int, page_size: int, heads_first: bool) -> Tensor:
    """`dense` ``[tokens, kv_heads, head_dim]`` at the flat places `place`, NaN elsewhere."""
    heads, head_dim = dense.shape[1:]
    pool = poison_(torch.empty(pages * page_size, heads, head_dim, dtype=BF16))
    pool[place] = dense
    pool = pool.view(pages, page_size, heads, head_dim)
    if heads_first:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    # `cuda` keeps the strides of a dense tensor.
    return pool.cuda()


def paged(
    lengths: Sequence[int],
    *,
    page_size: int,
    capacity: int,
    kv_heads: int = 2,
    head_dim: int = 64,
    heads_first: bool = False,
    append: bool = False,
    reserved: bool = False,
) -> Paged:
    """A cache of sequences of `lengths` tokens, built on the CPU.

    Args:
        lengths: of the sequences.
        page_size: tokens of a page.
        capacity: tokens that a row of the page table has room for, at least.
        kv_heads: heads of K and V.
        head_dim: elements of a head.
        heads_first: whether a page is ``[kv_heads, page_size, head_dim]`` in memory.
        append: whether the newest token of each sequence is passed as new_k and new_v.
        reserved: whether every entry of the page table has a page, so that sequences may grow.
    """
    batch, longest = len(lengths), max(*lengths, 1)
    width = -(-capacity // page_size)
    counts = [width if reserved else -(-n // page_size) for n in lengths]
    pages = sum(counts) + 3
    ids = torch.randperm(pages, dtype=INT32)
    table = torch.full((batch, width), NO_PAGE, dtype=INT32)
    for row, some in zip(table, ids.split([*counts, 3]), strict=False):
        row[: len(some)] = some
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    sequence, position = keep.nonzero(as_tuple=True)
    place = table[sequence, position // page_size].long() * page_size + position % page_size
    old = position != torch.tensor(lengths)[sequence] - 1
    dense, before, filled, newest = [], [], [], []
    for _ in range(2):
        x = torch.randn(batch, longest, kv_heads, head_dim).to(BF16)
        tokens = x[sequence, position]
        filled.append(_pool(tokens, place, pages, page_size, heads_first))
        there = old if append else torch.ones_like(old)
        before.append(_pool(tokens[there], place[there], pages, page_size, heads_first))
        last = (torch.tensor(lengths) - 1).clamp(min=0)
        newest.append(x[torch.arange(batch), last][:, None].cuda())
        dense.append(x.cuda())
    return Paged(
        *before,
        page_table=table.cuda(),
        seq_lens=torch.tensor(lengths, dtype=INT32).cuda(),
        page_size=page_size,
        k=dense[0],
        v=dense[1],
        keep=keep.cuda(),
        new={"new_k": newest[0], "new_v": newest[1]} if append else {},
        filled=(filled[0], filled[1]),
    )
