# SPDX-License-Identifier: Apache-2.0
"""add_rms_norm: residual add and RMSNorm for 1 to 8 tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library
from ._native import native

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    static_weights: bool = False,
) -> tuple[Tensor, Tensor]:
    """``s = x + residual``; ``out = weight * (s * rsqrt(mean(s^2) + eps))``.

    Rounded to bf16 where Llama's modules round: ``s``, the normalised row, the product with
    ``weight``. The mean is an fp32 sum in a fixed order. RMSNorm: Zhang and Sennrich, 2019.

    Args:
        x: ``[K]`` or ``[M, K]``, M in 1..8, bf16, contiguous, any K >= 1.
        residual: of the shape of ``x``, bf16, contiguous.
        weight: ``[K]``, bf16, contiguous.
        eps: added to the mean square; finite, >= 0.
        static_weights: as in :func:`astrai_gemv.bf16_gemv`, for ``weight``.

    Returns:
        ``(out, s)``, both of the shape of ``x``; ``s`` is the next residual.

    Raises:
        ValueError: a shape, a layout or a device that the kernel does not take; an invalid ``eps``.
        TypeError: a dtype other than bf16, or an argument that is no plain tensor.
        RuntimeError: as for :func:`astrai_gemv.bf16_gemv`.
    """
    if torch.compiler.is_compiling():
        return _library.add_rms_norm(x, residual, weight, eps, static_weights)
    return native.add_rms_norm(x, residual, weight, eps, static_weights)
