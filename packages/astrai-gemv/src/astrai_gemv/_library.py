# SPDX-License-Identifier: Apache-2.0
"""The ops as torch operators (`torch.ops.astrai_gemv`), for torch.compile only.

An eager call through the dispatcher costs 8 us more than one of the compiled module, so the public
functions come here only while torch.compile traces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from . import _fakes
from ._native import native
from ._transforms import refuse_forward_mode, refuse_transform

_NO_BACKWARD = (
    "an input requires grad, and this op has no backward; "
    "call it under torch.no_grad() or torch.inference_mode()"
)

_lib = Library("astrai_gemv", "DEF")


def _refuse_backward(ctx: Any, inputs: Any, output: Any) -> None:
    raise RuntimeError(_NO_BACKWARD)


def _unreachable_backward(ctx: Any, *grads: Any) -> None:
    raise AssertionError("setup_context raised before a backward could be recorded")


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]

    def checked(*arguments: Any) -> Any:
        refuse_forward_mode()
        return run(*arguments)

    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _lib.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"astrai_gemv::{name}", fake, lib=_lib)
    if "!" not in schema:
        torch.library.register_autograd(
            f"astrai_gemv::{name}", _unreachable_backward, setup_context=_refuse_backward, lib=_lib
        )


_register(
    "bf16_gemv(Tensor x, Tensor weight, Tensor? bias, bool static_weights) -> Tensor",
    lambda x, w, b, static: native.bf16_gemv(x, w, b, None, static),
    _fakes.linear,
)
_register(
    "bf16_gemv_out(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, bool static_weights) "
    "-> ()",
    lambda x, w, b, out, static: (native.bf16_gemv(x, w, b, out, static), None)[1],
    _fakes.linear_out,
)
_register(
    "bf16_swiglu(Tensor x, Tensor up_weight, Tensor gate_weight, bool static_weights) -> Tensor",
    lambda x, up, gate, static: native.bf16_swiglu(x, up, gate, None, static),
    _fakes.swiglu,
)
_register(
    "bf16_swiglu_out(Tensor x, Tensor up_weight, Tensor gate_weight, Tensor(a!) out, "
    "bool static_weights) -> ()",
    lambda x, up, gate, out, static: (native.bf16_swiglu(x, up, gate, out, static), None)[1],
    _fakes.swiglu_out,
)
_register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool static_weights) "
    "-> (Tensor, Tensor)",
    # Looked up at the call: without a compiled module, importing this must not fail.
    lambda x, residual, w, eps, static: native.add_rms_norm(x, residual, w, eps, static),  # noqa: PLW0108
    _fakes.add_rms_norm,
)


def _refuse_grad(*tensors: Tensor | None) -> None:
    # The operators that write into `out` cannot register a backward that raises.
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(_NO_BACKWARD)
    # Raised in traced code this would be a graph break, and the eager call may take the operands.
    refuse_transform()


def bf16_gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, static_weights: bool
) -> Tensor:
    _refuse_grad(x, weight, bias, out)
    if out is None:
        result: Tensor = torch.ops.astrai_gemv.bf16_gemv(x, weight, bias, static_weights)
        return result
    torch.ops.astrai_gemv.bf16_gemv_out(x, weight, bias, out, static_weights)
    return out


def bf16_swiglu(
    x: Tensor, up_weight: Tensor, gate_weight: Tensor, out: Tensor | None, static_weights: bool
) -> Tensor:
    _refuse_grad(x, up_weight, gate_weight, out)
    if out is None:
        result: Tensor = torch.ops.astrai_gemv.bf16_swiglu(
            x, up_weight, gate_weight, static_weights
        )
        return result
    torch.ops.astrai_gemv.bf16_swiglu_out(x, up_weight, gate_weight, out, static_weights)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, static_weights: bool
) -> tuple[Tensor, Tensor]:
    _refuse_grad(x, residual, weight)
    result: tuple[Tensor, Tensor] = torch.ops.astrai_gemv.add_rms_norm(
        x, residual, weight, eps, static_weights
    )
    return result
