# SPDX-License-Identifier: Apache-2.0
"""linear: ``x @ weight.T + bias``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.policy import obstacle_in

from ._select import select

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as `torch.nn.functional.linear` has it.

    For 1 to 8 tokens in bf16 on a GPU the gemv family's kernel may serve the call, selected by
    `use`, then ``ASTRAI_GEMV``, then the measured table. Every other call runs on torch: training,
    prefill, other dtypes, layouts and devices. `explain` says which and why.

    torch.compile decides while it traces, by the `use` and ``ASTRAI_GEMV`` of that moment; a change
    of either takes effect in code that is traced anew (`torch.compiler.reset`).

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]``.

    Raises:
        RuntimeError: `use` demands the kernel and it cannot serve the call.
        ValueError: ``ASTRAI_GEMV`` is none of 0, 1, auto.
        Exception: what `torch.nn.functional.linear` raises for operands that do not fit.
    """
    if torch.compiler.is_compiling():
        # It needs torch._dynamo, whose import takes a second.
        from . import _traced

        return _traced.linear(x, weight, bias)
    obstacle = obstacle_in(x, (weight,), bias)
    label = "weight {}" if bias is None else "weight {} bias"
    decision = select("linear", x, weight, obstacle, label)
    if decision.kernel is None:
        return F.linear(x, weight, bias)
    if x.dim() <= 2:
        flat: Tensor = decision.kernel(x, weight, bias)
        return flat
    y: Tensor = decision.kernel(x.view(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])
