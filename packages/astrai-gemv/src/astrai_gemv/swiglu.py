# SPDX-License-Identifier: Apache-2.0
"""bf16_swiglu: both projections of a gated MLP and their product, for 1 to 8 tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library
from ._native import native

__all__ = ["bf16_swiglu"]


def bf16_swiglu(
    x: Tensor,
    up_weight: Tensor,
    gate_weight: Tensor,
    *,
    out: Tensor | None = None,
    static_weights: bool = False,
) -> Tensor:
    """``out = up * silu(gate)`` with ``up = x @ up_weight.T`` and ``gate = x @ gate_weight.T``.

    The bf16 roundings of the unfused computation are kept: ``up``, ``gate``, ``silu(gate)`` and the
    product are each rounded once; the dot products are accumulated in fp32.

    Args:
        x: ``[K]`` or ``[M, K]``, M in 1..8, bf16, contiguous, K divisible by 8.
        up_weight: ``[N, K]``, bf16, rows contiguous.
        gate_weight: ``[N, K]``, bf16, rows contiguous. All three start their rows on 16 bytes.
        out: as for :func:`astrai_gemv.bf16_gemv`.
        static_weights: as in :func:`astrai_gemv.bf16_gemv`, for both weights.

    Returns:
        ``out``, of shape ``[N]`` for a 1-D ``x`` and ``[M, N]`` otherwise.

    Raises:
        ValueError: a shape, a layout, an alignment or a device that the kernel does not take.
        TypeError: a dtype other than bf16, or an argument that is no plain tensor.
        RuntimeError: as for :func:`astrai_gemv.bf16_gemv`, and so torch.OutOfMemoryError.
    """
    if torch.compiler.is_compiling():
        return _library.bf16_swiglu(x, up_weight, gate_weight, out, static_weights)
    return native.bf16_swiglu(x, up_weight, gate_weight, out, static_weights)
