# SPDX-License-Identifier: Apache-2.0
"""attn_decode, attn_paged_decode: attention of one query token of each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from . import _decode_library
from ._native import native

if TYPE_CHECKING:
    from ._attention import DeviceInfo

__all__ = ["attn_decode", "attn_paged_decode", "decode_workspace_size"]


@overload
def attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = ...,
    is_causal: bool = ...,
    *,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
    lse: None = ...,
    workspace: Tensor | None = ...,
) -> Tensor: ...
@overload
def attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = ...,
    is_causal: bool = ...,
    *,
    scale: float | None = ...,
    return_lse: Literal[True],
    out: Tensor | None = ...,
    lse: Tensor | None = ...,
    workspace: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = ...,
    is_causal: bool = ...,
    *,
    scale: float | None = ...,
    return_lse: bool = ...,
    out: Tensor | None = ...,
    lse: Tensor,
    workspace: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attn_decode(
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
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale * q k^T) v`` for one token of each sequence, over contiguous K and V.

    Query head ``h`` attends to KV head ``h * kv_heads // q_heads``. bf16 operands, products and
    sums in fp32, probabilities rounded to bf16 before they meet V, one rounding of the result. The
    sums are merged in a fixed order: two runs are bitwise equal. Runs on torch's current stream and
    may be captured into a CUDA graph. Online softmax and split K/V: Flash-Decoding, Dao et al.,
    2023.

    Args:
        q: ``[batch, 1, q_heads, head_dim]``, bf16, head_dim 32, 64, 128 or 256.
        k: ``[batch, kv_len, kv_heads, head_dim]``, bf16; kv_heads divides q_heads. Only the last
            dimension need be contiguous, as long as every row starts on 16 bytes (of q too).
        v: of the shape and the strides of ``k``.
        mask: True keeps a key: bool ``[batch, kv_len]``, ``[batch, 1, kv_len]`` or
            ``[batch, 1, 1, kv_len]``. A row without any key gives zeros, and lse -inf. In other
            rows the V of a masked key has to be finite: it is multiplied by 0.
        is_causal: no effect: the one query is the newest token.
        scale: of the scores, positive; ``head_dim ** -0.5`` when None.
        return_lse: whether to return the natural logarithm of the sum of exponentials too.
        out: of the shape of ``q``, bf16, rows on 16 bytes. Allocated when None, as are the next
            two; what is given may share no memory with an input or with one another.
        lse: where to put the logarithms, which are then returned: fp32 ``[batch, q_heads, 1]``,
            contiguous.
        workspace: scratch memory, uint8 ``[bytes]`` on 16 bytes, at least `decode_workspace_size`
            of them. Calls that run one after the other may share it, replays of graphs included;
            a graph writes to it for as long as it is replayed. With ``out``, this and, if it is
            wanted, ``lse``, the call allocates nothing.

    Returns:
        ``out``; with ``return_lse`` or ``lse`` ``(out, lse)``.

    Raises:
        ValueError: a shape, a layout, an alignment or a device that the kernel does not take.
        TypeError: another dtype, or an argument that is no plain tensor.
        RuntimeError: no compiled module, no code for this GPU, an input that requires grad while
            grad is enabled, or an error of the CUDA runtime.
    """
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: expected a bool, got {type(is_causal).__name__}")
    if torch.compiler.is_compiling():
        return _decode_library.attn_decode(q, k, v, mask, scale, return_lse, out, lse, workspace)
    return native.attn_decode(q, k, v, mask, scale, return_lse, out, lse, workspace)


@overload
def attn_paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    new_k: Tensor | None = ...,
    new_v: Tensor | None = ...,
    scale: float | None = ...,
    static_cache: bool = ...,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
    lse: None = ...,
    workspace: Tensor | None = ...,
) -> Tensor: ...
@overload
def attn_paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    new_k: Tensor | None = ...,
    new_v: Tensor | None = ...,
    scale: float | None = ...,
    static_cache: bool = ...,
    return_lse: Literal[True],
    out: Tensor | None = ...,
    lse: Tensor | None = ...,
    workspace: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def attn_paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    new_k: Tensor | None = ...,
    new_v: Tensor | None = ...,
    scale: float | None = ...,
    static_cache: bool = ...,
    return_lse: bool = ...,
    out: Tensor | None = ...,
    lse: Tensor,
    workspace: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attn_paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    new_k: Tensor | None = None,
    new_v: Tensor | None = None,
    scale: float | None = None,
    static_cache: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attn_decode` over K and V in pages, with the newest token's appended.

    The token at position ``p`` of sequence ``b`` is in page ``page_table[b, p // page_size]``, slot
    ``p % page_size``. Lengths are read on the device: a captured graph serves any lengths up to the
    capacity of ``page_table``, ``page_table.shape[1] * page_size``, by which its work is split.
    Entries of ``page_table`` past a sequence's length may hold anything; K and V past it are not
    read.

    Args:
        q: ``[batch, 1, q_heads, head_dim]``, bf16, head_dim 32, 64, 128 or 256.
        k_pool: ``[pages, page_size, kv_heads, head_dim]``, bf16, in any order of the middle two in
            memory (``[pages, kv_heads, page_size, head_dim]`` by ``transpose(1, 2)``).
        v_pool: of the shape and the strides of ``k_pool``.
        page_table: ``[batch, pages of a sequence]``, int32, rows contiguous.
        seq_lens: ``[batch]``, int32; with ``new_k`` it counts the newest token. 0 gives zeros.
        page_size: a power of two up to 256.
        new_k: ``[batch, 1, kv_heads, head_dim]``, bf16, already rotated: the K at position
            ``seq_lens - 1``, which is stored in the pool, and read from here.
        new_v: likewise V; both or neither.
        scale: as for `attn_decode`.
        static_cache: lets the kernel read ``seq_lens``, ``page_table`` and the pools, but for the
            newest tokens if they are given, before the kernels in flight have ended (sm_90 and
            newer; torch.compile leaves it out). Only where none of those writes what is read so.
            In flight are the preceding kernel of the stream and, if that was launched before its
            predecessor ended, as all kernels of astrai are, the one before it, and so on to the
            last that was not.
        return_lse: likewise.
        out: likewise.
        lse: likewise.
        workspace: likewise.

    Returns:
        As `attn_decode`.

    Raises:
        ValueError, TypeError, RuntimeError: as `attn_decode`.
    """
    compiling = torch.compiler.is_compiling()
    run = _decode_library.attn_paged_decode if compiling else native.attn_paged_decode
    return run(
        q,
        k_pool,
        v_pool,
        page_table,
        seq_lens,
        page_size,
        new_k,
        new_v,
        scale,
        static_cache,
        return_lse,
        out,
        lse,
        workspace,
    )


def decode_workspace_size(
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    max_length: int,
    device: int | DeviceInfo,
) -> int:
    """The bytes of workspace that decode takes for a problem; 0 for many.

    No entry of ``seq_lens`` matters. It is no bound for smaller problems: for several batch sizes
    take the largest of theirs.

    Args:
        batch: sequences, 0 too, as the other sizes those of the call's tensors.
        q_heads: query heads.
        kv_heads: KV heads.
        head_dim: elements of a head.
        max_length: ``k.shape[1]``; over pages ``page_table.shape[1] * page_size``.
        device: index of the GPU, such as ``q.get_device()``, or its description, which needs none.

    Raises:
        ValueError: a problem that decode does not take, or an index without a device.
        RuntimeError: no compiled module, or no code for this GPU.
    """
    if batch == 0:
        return 0
    found = native.plan_decode(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=max_length,
        is_exact=False,  # no matter for the workspace
        device=native.device_info(device) if isinstance(device, int) else device,
    )
    return int(found["workspace_bytes"])
