# SPDX-License-Identifier: Apache-2.0
"""rotary_emb: rotary position embedding of queries or keys."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library
from ._native import native

__all__ = ["rotary_emb"]


def rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates each pair ``(a, b)`` of a head to ``(a * cos - b * sin, b * cos + a * sin)``.

    Computed in fp32 and rounded to bf16 once. The kernel runs on torch's current stream and may be
    captured into a CUDA graph. Rotary embedding: Su et al., 2021.

    Args:
        x: ``[batch, seq, heads, head_dim]`` or packed ``[tokens, heads, head_dim]``, bf16, head_dim
            a multiple of 16 up to 512. Only the last dimension need be contiguous, as long as every
            row starts on 16 bytes: a slice of a fused projection will do.
        cos: ``[seq, head_dim / 2]``, shared by the batch, or ``[batch, seq, head_dim / 2]``; for a
            packed ``x`` ``[tokens, head_dim / 2]``. fp32, rows contiguous and on 16 bytes.
        sin: as ``cos``.
        interleaved: which pairs. True: elements ``2i`` and ``2i + 1``, the product of complex
            numbers. False: ``i`` and ``i + head_dim / 2``, as Llama checkpoints of transformers.
        out: of the shape of ``x``, bf16, laid out as freely as ``x``: ``x`` itself, or a tensor
            that shares no memory with it. Allocated (contiguous) when None.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, a layout, an alignment or a device that the kernel does not take.
        TypeError: a dtype other than bf16 (fp32 for the angles), or an argument that is no plain
            tensor.
        RuntimeError: no compiled module, no code for this GPU, an input that requires grad while
            grad is enabled, or an error of the CUDA runtime.
    """
    if torch.compiler.is_compiling():
        return _library.rotary_emb(x, cos, sin, interleaved, out)
    return native.rotary_emb(x, cos, sin, interleaved, out)
