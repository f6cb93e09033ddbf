# SPDX-License-Identifier: Apache-2.0
"""linear: ``x @ weight.T + bias``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core import recording
from astrai_core.policy import Decision, decide, describe, obstacle_in

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as `torch.nn.functional.linear` has it.

    For 1 to 8 tokens in bf16 on a GPU the gemv family's kernel may serve the call, selected by
    `use`, then ``ASTRAI_GEMV``, then the measured table. Every other call runs on torch: training,
    prefill, other dtypes, layouts and devices. `explain` says which and why.

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
    decision = _decide(x, weight, bias)
    if decision.kernel is None:
        return F.linear(x, weight, bias)
    if x.dim() <= 2:
        flat: Tensor = decision.kernel(x, weight, bias)
        return flat
    y: Tensor = decision.kernel(x.view(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _decide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Decision:
    obstacle = obstacle_in(x, (weight,), bias)
    if obstacle is None and (
        x.dim() == 0
        or x.shape[-1] != weight.shape[1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        obstacle = "the shapes do not fit"
    n = weight.shape[0] if obstacle is None else -1
    call = describe("linear", x, n, obstacle)
    decision = decide(call)
    if reports := recording.active():
        shapes = f"x {recording.shape_of(x)} weight {recording.shape_of(weight)}"
        recording.record(
            reports,
            "linear",
            shapes if bias is None else f"{shapes} bias",
            str(x.dtype).removeprefix("torch."),
            str(x.device),
            decision.chosen,
            decision.passed_over,
        )
    return decision
