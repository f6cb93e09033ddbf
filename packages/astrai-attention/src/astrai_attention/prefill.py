# SPDX-License-Identifier: Apache-2.0
"""Prefill attention over contiguous and paged keys and values, and its query tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from . import _library
from ._family import Q_TILE_ROWS
from ._native import native

__all__ = ["Q_TILE_ROWS", "attn_paged_prefill", "attn_prefill", "q_tile_schedule"]


@overload
def attn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    out: Tensor | None = None,
    lse: None = None,
) -> Tensor: ...
@overload
def attn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor,
) -> tuple[Tensor, Tensor]: ...
def attn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale * q @ k.T) @ v`` for each head, by FlashAttention-2 (Dao, 2023).

    Computed in fp32 on tensor cores from bf16 operands; the probabilities and the result are
    rounded to bf16. The kernel runs on torch's current stream and may be captured into a CUDA
    graph. Bitwise repeatable.

    A query that may see no key gives zeros, and ``-inf`` as its logarithm.

    Args:
        q: ``[batch, q_len, q_heads, head_dim]``, bf16, head_dim 32, 64, 128 or 256. Only the last
            dimension need be contiguous, as long as every row starts on 16 bytes.
        k: ``[batch, kv_len, kv_heads, head_dim]``, bf16, laid out as freely as ``q``; kv_heads
            divides q_heads, and query head ``h`` reads KV head ``h // (q_heads // kv_heads)``.
        v: of the shape and the strides of ``k``.
        mask: bool, True keeps a key: ``[batch, kv_len]``, ``[batch, q_len, kv_len]`` or
            ``[batch, 1, q_len, kv_len]``, the last dimension contiguous. A masked key's V has to be
            finite, where another key is kept.
        is_causal: query ``i`` sees keys up to ``kv_len - q_len + i`` only, of those that ``mask``
            keeps.
        scale: positive; ``1 / sqrt(head_dim)`` when None.
        return_lse: whether to return the logarithms of the softmax's denominators too.
        out: of the shape of ``q``, bf16, laid out as freely, in memory of its own. Allocated
            (contiguous) when None.
        lse: where to put the natural logarithms, which are then returned: fp32
            ``[batch, q_heads, q_len]``, contiguous, in memory of its own. With this, if it is
            wanted, and ``out`` the call allocates nothing.

    Returns:
        ``out``; with ``return_lse`` or ``lse`` ``(out, lse)``.

    Raises:
        ValueError: a shape, a layout, an alignment, a scale or a device that the kernel does not
            take.
        TypeError: a dtype other than bf16 (bool for the mask), or an argument of another type.
        RuntimeError: no compiled module, no code for this GPU, an input that requires grad while
            grad is enabled, or an error of the CUDA runtime.
    """
    if torch.compiler.is_compiling():
        return _library.attn_prefill(q, k, v, mask, is_causal, scale, return_lse, out, lse)
    return native.attn_prefill(q, k, v, mask, is_causal, scale, return_lse, out, lse)


@overload
def attn_paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    q_tile_to_batch: Tensor,
    q_tile_to_index: Tensor,
    *,
    page_size: int,
    is_causal: bool = True,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    out: Tensor | None = None,
    lse: None = None,
) -> Tensor: ...
@overload
def attn_paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    q_tile_to_batch: Tensor,
    q_tile_to_index: Tensor,
    *,
    page_size: int,
    is_causal: bool = True,
    scale: float | None = None,
    return_lse: Literal[True],
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    q_tile_to_batch: Tensor,
    q_tile_to_index: Tensor,
    *,
    page_size: int,
    is_causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor,
) -> tuple[Tensor, Tensor]: ...
def attn_paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    q_tile_to_batch: Tensor,
    q_tile_to_index: Tensor,
    *,
    page_size: int,
    is_causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attn_prefill` of a ragged batch over a paged cache.

    Sequence ``b`` has queries ``qo_indptr[b]..qo_indptr[b + 1]`` of ``q`` and
    ``kv_indptr[b + 1] - kv_indptr[b]`` keys; key ``j`` lies in page
    ``page_table[b, j // page_size]`` at ``j % page_size``. Entries of the table past a sequence's
    last page are not read, nor are pages past its last key. What the index tensors hold is not
    checked: it is on the device.

    Args:
        q: ``[total_q, q_heads, head_dim]``, as freely laid out as that of `attn_prefill`.
        k_pool: ``[pages, page_size, kv_heads, head_dim]``, bf16: a view whose strides say in which
            order the middle dimensions lie.
        v_pool: of the shape and the strides of ``k_pool``.
        page_table: int32 ``[batch, max_pages]``, rows contiguous.
        qo_indptr: int32 ``[batch + 1]``, running sums of the numbers of queries.
        kv_indptr: int32 ``[batch + 1]``, running sums of the numbers of keys.
        q_tile_to_batch: int32 ``[q_tiles]``, as `q_tile_schedule` gives it for `Q_TILE_ROWS`.
        q_tile_to_index: int32 ``[q_tiles]``, likewise. Rows of ``q`` without a tile are not
            computed.
        page_size: a power of two up to 256.
        is_causal: the last query of a sequence sees all of its keys, the one before all but the
            last, and so on.
        scale: positive; ``1 / sqrt(head_dim)`` when None.
        return_lse: whether to return the logarithms of the softmax's denominators too.
        out: of the shape of ``q``, bf16, laid out as freely, in memory of its own. Allocated
            (contiguous) when None.
        lse: as that of `attn_prefill`, of shape ``[q_heads, total_q]``.

    Returns:
        ``out``; with ``return_lse`` or ``lse`` ``(out, lse)``.

    Raises:
        ValueError: a shape, a layout, an alignment, a scale or a device that the kernel does not
            take.
        TypeError: a dtype other than bf16 (int32 for indices), or an argument of another type.
        RuntimeError: no compiled module, no code for this GPU, an input that requires grad while
            grad is enabled, or an error of the CUDA runtime.
    """
    run = (
        _library.attn_paged_prefill if torch.compiler.is_compiling() else native.attn_paged_prefill
    )
    return run(
        q,
        k_pool,
        v_pool,
        page_table,
        qo_indptr,
        kv_indptr,
        q_tile_to_batch,
        q_tile_to_index,
        page_size,
        is_causal,
        scale,
        return_lse,
        out,
        lse,
    )


def q_tile_schedule(
    q_lens: Sequence[int], tile_rows: int = Q_TILE_ROWS
) -> tuple[list[int], list[int], list[int]]:
    """The tiles of queries that are packed one sequence after the other.

    No tile crosses from one sequence into the next, and none is empty.

    Args:
        q_lens: queries of each sequence.
        tile_rows: rows of a tile; the last tile of a sequence may have fewer.
            `attn_paged_prefill` takes those of `Q_TILE_ROWS`.

    Returns:
        ``qo_indptr``: where each sequence's queries begin, and the total as the last entry.
        ``q_tile_to_batch``: the sequence of each tile.
        ``q_tile_to_index``: the position of each tile within its sequence, in tiles.

    Raises:
        ValueError: a negative length, more than 2147483647 queries, or no rows in a tile.
        TypeError: a length that is not an int.
    """
    return native.q_tile_schedule(q_lens, tile_rows)
