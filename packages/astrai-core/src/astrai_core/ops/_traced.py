# SPDX-License-Identifier: Apache-2.0
"""Selection while torch.compile traces: decided once, from what a trace knows, and baked in.

A trace knows no addresses, and its guards say nothing of them: operands that are off their boundary
come later. The kernel of linear takes them. That of swiglu does not, so a trace calls an operator
of this package instead of the family's, which selects again when it runs and falls back to torch.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library
from torch.nn import Parameter

from astrai_core import discovery
from astrai_core.policy import MAX_TOKENS, OPS, Call, decide, mode, selected, transform

from .swiglu import eager as _eager_swiglu

_PLAIN = (Tensor, Parameter, FakeTensor)  # torch.export traces fake tensors
_NO_DERIVATIVE = (
    "torch.ops.astrai_core.swiglu has no derivative; call astrai_core.swiglu, which has one"
)


def _fake_swiglu(x: Tensor, up_weight: Tensor, _gate_weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], up_weight.shape[0]))


def _no_backward(*_: Any, **__: Any) -> None:
    """Without one, gradients would silently be lost."""
    raise RuntimeError(_NO_DERIVATIVE)


def _run_swiglu(x: Tensor, up_weight: Tensor, gate_weight: Tensor) -> Tensor:
    if transform() is not None:  # no rule of autograd is asked in forward mode
        raise RuntimeError(_NO_DERIVATIVE)
    return _eager_swiglu(x, up_weight, gate_weight)


_lib = Library("astrai_core", "DEF")
_lib.define(
    "swiglu(Tensor x, Tensor up_weight, Tensor gate_weight) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_lib.impl("swiglu", _run_swiglu, "CompositeExplicitAutograd")
torch.library.register_fake("astrai_core::swiglu", _fake_swiglu, lib=_lib)
torch.library.register_autograd(
    "astrai_core::swiglu", _no_backward, setup_context=_no_backward, lib=_lib
)


def _guard_forward_level() -> None:
    """Has dynamo trace anew inside a level of forward mode that is opened later.

    It guards functorch's levels itself, but those of forward mode only where it opens one. A torch
    that has lost these names may use a trace there that has no derivative.
    """
    try:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import GlobalStateSource
        from torch._guards import TracingContext

        if TracingContext.try_get() is not None:
            install_guard(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
    except (ImportError, AttributeError):
        return


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _namespace(call: tuple[Any, ...]) -> str:
    """The namespace of torch.ops in which the call's kernel is an operator; empty for torch.

    A trace can bake in a text, not a function. A family registers its ops under its import name.
    """
    op, gpu, m, n, k, obstacle = call
    # Asked here, where a trace runs Python: it really opens the levels that it traces.
    obstacle = obstacle or transform()
    _guard_forward_level()
    decision = decide(Call(op, selected(op), mode(op), gpu, m, n, k, obstacle))
    if decision.kernel is None:
        return ""
    return str(discovery.family(decision.chosen).package)


def _namespace_of(op: str, x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None) -> str:
    """`_namespace` of a call, for sizes that may be symbols."""
    call = _describe(op, x, weights, bias)
    if call is None:
        return ""
    _, gpu, m, n, k, obstacle = call
    if obstacle is None and gpu < 0:
        obstacle = "x is not on a CUDA device"
    if obstacle is not None:
        return str(_namespace((op, -1, -1, -1, -1, obstacle)))
    # A decision is about sizes, so the trace is bound to them; int() would leave them symbols.
    return str(_namespace((op, gpu, index(m), index(n), index(k), None)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`astrai_core.linear` in a trace."""
    namespace = _namespace_of("linear", x, (weight,), bias)
    if not namespace:
        return F.linear(x, weight, bias)
    kernel = getattr(getattr(torch.ops, namespace), OPS["linear"].kernel)
    y: Tensor = kernel(x.view(-1, x.shape[-1]), weight, bias, False)
    return y.view(*x.shape[:-1], weight.shape[0])


def swiglu(x: Tensor, up_weight: Tensor, gate_weight: Tensor) -> Tensor:
    """`astrai_core.swiglu` in a trace."""
    namespace = _namespace_of("swiglu", x, (up_weight, gate_weight), None)
    if not namespace:
        return linear(x, up_weight, None) * F.silu(linear(x, gate_weight, None))
    y: Tensor = torch.ops.astrai_core.swiglu(x, up_weight, gate_weight)
    return y


def _describe(
    op: str, x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None
) -> tuple[Any, ...] | None:
    """What a decision depends on and a trace knows; None for operands that do not fit."""
    operands = (x, *weights) if bias is None else (x, *weights, bias)
    # First of all: what is not plain may have no sizes that can be asked.
    if any(type(tensor) not in _PLAIN for tensor in operands):
        return op, -1, -1, -1, -1, "an operand is no plain tensor"
    if any(tensor.layout != torch.strided or tensor.is_nested for tensor in operands):
        return op, -1, -1, -1, -1, "an operand is sparse or nested"
    if x.dim() == 0 or any(w.dim() != 2 or w.shape[1] != x.shape[-1] for w in weights):
        return None
    obstacle = _obstacle_in(operands)
    if any(w.shape != weights[0].shape for w in weights) or (
        bias is not None and bias.shape != weights[0].shape[:1]
    ):
        obstacle = "the shapes do not fit"
    elif _gpu_of(x) >= 0 and torch.is_autocast_enabled(x.device.type):  # meta has no autocast
        obstacle = "autocast is active"
    m = 1
    for size in x.shape[:-1]:
        m *= size
    # Compared, not read: a trace for a prompt then serves prompts of any length.
    if obstacle is None and m > MAX_TOKENS:
        obstacle = f"the kernel takes 1 to {MAX_TOKENS} tokens"
    return op, _gpu_of(x), m, weights[0].shape[0], x.shape[-1], obstacle


def _obstacle_in(operands: tuple[Tensor, ...]) -> str | None:
    obstacle = None
    for tensor in operands:
        if tensor.dtype != torch.bfloat16:
            obstacle = "other operands than bfloat16"
        elif torch.is_grad_enabled() and tensor.requires_grad:
            obstacle = "training: an operand requires grad, and the kernel has no backward"
        elif tensor.device != operands[0].device:
            obstacle = "operands on different devices"
        elif not tensor.is_contiguous():
            obstacle = "an operand is not contiguous"
    return obstacle


def _gpu_of(x: Tensor) -> int:
    return x.get_device() if x.device.type == "cuda" else -1
