# SPDX-License-Identifier: Apache-2.0
"""Selection while torch.compile traces: decided once, from what a trace knows, and baked in."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core import discovery
from astrai_core.policy import OPS, Call, Decision, decide, mode, selected


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _namespace(call: tuple[Any, ...]) -> str:
    """The namespace of torch.ops in which the call's kernel is an operator; empty for torch.

    A trace can bake in a text, not a function. A family registers its ops under its import name.
    """
    decision = _decide(call)
    if decision.kernel is None:
        return ""
    return str(discovery.family(decision.chosen).package)


def _decide(call: tuple[Any, ...]) -> Decision:
    op, *rest = call
    return decide(Call(op, selected(op), mode(op), *rest))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`astrai_core.linear` in a trace."""
    call = _describe("linear", x, (weight,), bias)
    namespace = "" if call is None else _namespace(call)
    if not namespace:
        return F.linear(x, weight, bias)
    kernel = getattr(getattr(torch.ops, namespace), OPS["linear"].kernel)
    y: Tensor = kernel(x.view(-1, x.shape[-1]), weight, bias, False)
    return y.view(*x.shape[:-1], weight.shape[0])


def swiglu(x: Tensor, up_weight: Tensor, gate_weight: Tensor) -> Tensor:
    """`astrai_core.swiglu` in a trace."""
    call = _describe("swiglu", x, (up_weight, gate_weight), None)
    namespace = "" if call is None else _namespace(call)
    if not namespace:
        return linear(x, up_weight, None) * F.silu(linear(x, gate_weight, None))
    kernel = getattr(getattr(torch.ops, namespace), OPS["swiglu"].kernel)
    y: Tensor = kernel(x.view(-1, x.shape[-1]), up_weight, gate_weight, False)
    return y.view(*x.shape[:-1], up_weight.shape[0])


def _describe(
    op: str, x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None
) -> tuple[Any, ...] | None:
    """What a decision depends on and a trace knows; None for operands that do not fit.

    Fake tensors have no address: an operand that is off its boundary is found out by the kernel.
    """
    if x.dim() == 0 or any(w.dim() != 2 or w.shape[1] != x.shape[-1] for w in weights):
        return None
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
    gpu = -1
    if x.device.type == "cuda":
        gpu = x.get_device()
    m = 1
    for size in x.shape[:-1]:
        m *= size
    return op, gpu, int(m), int(weights[0].shape[0]), int(x.shape[-1]), obstacle
