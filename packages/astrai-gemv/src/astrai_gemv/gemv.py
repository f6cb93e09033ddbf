# SPDX-License-Identifier: Apache-2.0
"""bf16_gemv: a linear layer for 1 to 8 tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library
from ._native import native

__all__ = ["bf16_gemv"]


def bf16_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    static_weights: bool = False,
) -> Tensor:
    """``out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n]`` for M in 1..8.

    Products are accumulated in fp32 by ``mma.m16n8k16``, in an order that depends on N, K,
    alignment and the device, not on M: a token's result is the same beside any others.
    The bias is added before the one rounding to bf16. The kernel runs on torch's current stream
    and may be captured into a CUDA graph.

    Args:
        x: ``[K]`` or ``[M, K]``, bf16, contiguous, any K >= 1.
        weight: ``[N, K]``, bf16, rows contiguous (the stride between rows may exceed K).
        bias: ``[N]``, bf16, contiguous, or None.
        out: ``[N]`` or ``[M, N]``, bf16, contiguous, sharing no memory with the inputs, nor lying
            between their rows; allocated when None.
        static_weights: lets the kernel read ``weight`` while the preceding kernel of the stream
            still runs (sm_90 and newer). Only for weights that no kernel still in flight writes.

    Returns:
        ``out``, of shape ``[N]`` for a 1-D ``x`` and ``[M, N]`` otherwise.

    Raises:
        ValueError: a shape, a layout or a device that the kernel does not take.
        TypeError: a dtype other than bf16, or an argument that is no plain tensor.
        RuntimeError: no compiled module, no code for this GPU, an input or ``out`` that requires
            grad while grad is enabled, or an error of the CUDA runtime.
        torch.OutOfMemoryError: there is no memory for ``out``.
    """
    if torch.compiler.is_compiling():
        return _library.bf16_gemv(x, weight, bias, out, static_weights)
    return native.bf16_gemv(x, weight, bias, out, static_weights)
