# SPDX-License-Identifier: Apache-2.0
"""Selection while torch.compile traces: decided once, from what a trace knows, and baked in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..policy import Call, decide, mode, selected

# What the decisions found, for the trace to look up by a constant.
_kernels: dict[str, Callable[..., Any]] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _decide_once(op: str, index: int, m: int, n: int, k: int, obstacle: str | None) -> bool:
    decision = decide(Call(op, selected(op), mode(op), index, m, n, k, obstacle))
    if decision.kernel is None:
        return False
    _kernels[op] = decision.kernel
    return True


def traced_kernel(
    op: str, x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None
) -> Callable[..., Any] | None:
    """The kernel for a call that is being traced, or None for torch.

    Fake tensors have no address: an operand that is off its boundary is found out by the kernel.
    """
    obstacle = None
    for tensor in (x, *weights) if bias is None else (x, *weights, bias):
        if tensor.dtype != torch.bfloat16:
            obstacle = "other operands than bfloat16"
        elif torch.is_grad_enabled() and tensor.requires_grad:
            obstacle = "training: an operand requires grad, and the kernel has no backward"
        elif tensor.device != x.device:
            obstacle = "operands on different devices"
        elif not tensor.is_contiguous():
            obstacle = "an operand is not contiguous"
    if x.dim() == 0 or any(w.dim() != 2 or w.shape[1] != x.shape[-1] for w in weights):
        return None
    index = -1
    if x.device.type == "cuda":
        index = x.device.index if x.device.index is not None else 0
    m = 1
    for size in x.shape[:-1]:
        m *= size
    n, k = int(weights[0].shape[0]), int(x.shape[-1])
    return _kernels[op] if _decide_once(op, index, int(m), n, k, obstacle) else None
