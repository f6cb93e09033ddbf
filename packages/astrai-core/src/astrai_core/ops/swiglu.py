# SPDX-License-Identifier: Apache-2.0
"""swiglu: the gated product of two projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.policy import obstacle_in

from ._select import select
from .linear import linear

__all__ = ["swiglu"]


def swiglu(x: Tensor, up_weight: Tensor, gate_weight: Tensor) -> Tensor:
    """``(x @ up_weight.T) * silu(x @ gate_weight.T)``.

    For 1 to 8 tokens in bf16 on a GPU one kernel of the gemv family may compute all of it, with
    the roundings of the unfused computation; selected by `use`, then ``ASTRAI_SWIGLU``, then the
    measured table. Otherwise the two projections are calls of `linear`, and torch multiplies.

    torch.compile decides while it traces, as for `linear`. Where it chose the kernel the call
    decides again each time it runs, since only then do operands have addresses.

    Args:
        x: ``[..., K]``.
        up_weight: ``[N, K]``.
        gate_weight: ``[N, K]``.

    Returns:
        ``[..., N]``.

    Raises:
        RuntimeError: `use` demands the kernel and it cannot serve the call.
        ValueError: ``ASTRAI_SWIGLU`` (or ``ASTRAI_GEMV``) is none of 0, 1, auto.
        Exception: what torch raises for operands that do not fit.
    """
    if torch.compiler.is_compiling():
        # It needs torch._dynamo, whose import takes a second.
        from . import _traced

        return _traced.swiglu(x, up_weight, gate_weight)
    return eager(x, up_weight, gate_weight)


def eager(x: Tensor, up_weight: Tensor, gate_weight: Tensor) -> Tensor:
    """`swiglu` outside of a trace."""
    obstacle = obstacle_in(x, (up_weight, gate_weight), None) or _off_boundary(
        x, up_weight, gate_weight
    )
    decision = select("swiglu", x, up_weight, obstacle, "up, gate {}")
    if decision.kernel is None:
        return linear(x, up_weight) * F.silu(linear(x, gate_weight))
    if x.dim() <= 2:
        flat: Tensor = decision.kernel(x, up_weight, gate_weight)
        return flat
    y: Tensor = decision.kernel(x.view(-1, x.shape[-1]), up_weight, gate_weight)
    return y.view(*x.shape[:-1], up_weight.shape[0])


def _off_boundary(*operands: Tensor) -> str | None:
    if any(t.data_ptr() % 16 or (t.dim() == 2 and t.stride(0) % 8) for t in operands):
        return "an operand's rows do not start on 16 bytes"
    return None
