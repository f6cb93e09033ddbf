# SPDX-License-Identifier: Apache-2.0
"""Attention by `torch.nn.functional.scaled_dot_product_attention`, dense and over a step."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from .step import Step


class _WithoutCudnn:
    """Keeps torch from cuDNN's attention while a block runs; nests, in any number of threads.

    cuDNN builds a plan for each new length of the keys, and decoding makes every length once: a
    fresh process decoded at a quarter of its later speed. The other kernels know no such start.
    `torch.nn.attention.sdpa_kernel` would do the same for 9 us a call (this: 1 us), and turn on
    kernels that the user has turned off. Torch keeps these switches for the whole process, so
    that the last thread to leave turns it on again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._was_on = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._was_on:
                torch.backends.cuda.enable_cudnn_sdp(True)


_without_cudnn = _WithoutCudnn()


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Attention in blhd; a query that may attend to nothing gives zeros.

    Args:
        q: ``[B, L, heads, head_dim]``.
        k: ``[B, S, kv_heads, head_dim]``.
        v: like k.
        mask: bool, of `attention`'s shapes, or broadcastable to ``[B, 1, L, S]``.
        is_causal: the last query attends to all keys, the one before to all but the last.
    """
    q_len, kv_len = q.shape[1], k.shape[1]
    mask = None if mask is None else as_4d(mask)
    # A single query at the end attends to everything. (Sizes are tensors to torch.jit.trace.)
    is_causal = bool(is_causal and q_len > 1)
    # A trace has the sizes of an example: equal ones may differ when it runs.
    if is_causal and (
        mask is not None or q_len != kv_len or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    ):
        # torch would align it to the first key.
        causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - q_len)
        mask = causal[None, None] if mask is None else mask & causal
        is_causal = False
    nothing = None
    if mask is not None:
        # A softmax over nothing is NaN, in some of torch's kernels and in their gradients.
        nothing = ~mask.any(-1, keepdim=True)
        mask = mask | nothing
    y = _decode(q, k, v, mask) if q_len == 1 else _prefill(q, k, v, mask, is_causal)
    if nothing is not None:
        y = y.masked_fill(nothing, 0)
    return y.transpose(1, 2).contiguous()


def _decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One query a sequence; in blhd, the result in bhld.

    The query heads of a key head stand as its queries: torch's kernels take grouped heads only
    without a mask.
    """
    batch, _, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    operands = (grouped, k.transpose(1, 2), v.transpose(1, 2), mask)
    # What is traced chooses its kernel when it runs.
    if q.is_cuda and not torch.compiler.is_compiling():
        with _without_cudnn:
            y = F.scaled_dot_product_attention(*operands)
    else:
        y = F.scaled_dot_product_attention(*operands)
    return y.reshape(batch, heads, 1, head_dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Any number of queries; in blhd, the result in bhld."""
    groups = q.shape[2] // k.shape[2]
    if mask is not None and groups > 1:
        # With grouped heads and a mask, torch would compute and store all scores.
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
        groups = 1
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=bool(groups > 1),
    )


def over_step(q: Tensor, step: Step, layer_id: int, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Attention of a step's queries over all cached tokens, those of this step included.

    Sequences of other lengths than the longest are padded.

    Args:
        q: as `Step.packed` takes it.
        step: the step, whose keys and values are written.
        layer_id: the layer.
        mask: for ``L = max_q_len`` and ``S = max_kv_len``, or None.
        is_causal: as `dense` has it, for each sequence.
    """
    batch, q_len, kv_len = len(step.seqs), step.max_q_len, step.max_kv_len
    k, v = step.gather_padded(layer_id)
    packed = step.packed("q", q)
    if step.uniform:
        padded = packed.view(batch, q_len, *packed.shape[1:])
    else:
        rows = step.qo_indptr[:-1, None] + torch.arange(q_len, device=q.device)
        padded = packed[rows.clamp(max=step.total_q - 1)]
    if not step.uniform or min(step.kv_lens) != kv_len:
        key = torch.arange(kv_len, device=q.device)
        inside = (key < step.seq_lens[:, None])[:, None, None]
        if is_causal:
            first = step.seq_lens - step.qo_indptr.diff()
            query = first[:, None] + torch.arange(q_len, device=q.device)
            inside = inside & (key <= query[:, None, :, None])
            is_causal = False
        mask = inside if mask is None else as_4d(mask) & inside
    y = dense(padded, k, v, mask, is_causal)
    if not step.uniform:
        y = y[step.batch_of, step.query_of]
    return y.reshape(q.shape)


def as_4d(mask: Tensor) -> Tensor:
    """A mask of 2, 3 or 4 dimensions as ``[B, 1, L or 1, S]``."""
    if mask.dim() == 2:
        return mask[:, None, None]
    return mask[:, None] if mask.dim() == 3 else mask
