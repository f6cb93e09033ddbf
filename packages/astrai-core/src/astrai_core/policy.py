# SPDX-License-Identifier: Apache-2.0
"""Selects an implementation for a call: context > environment > measured table > torch.

An op describes its call as a `Call`, which is hashable: the decision for it is computed once. What
can change between two equal calls (the context, the environment) is part of the description.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import device, discovery, tables

TORCH = "torch"
MAX_TOKENS = 8
MAX_K = 2**27
MAX_N = 2**31 - 65


@dataclass(frozen=True)
class OpSpec:
    """An op that a family implements too.

    Attributes:
        name: name of the op in astrai_core.
        family: the family that has a kernel for it.
        kernel: the op's name there.
        variable: environment variable that selects: 0, 1 or auto.
    """

    name: str
    family: str
    kernel: str
    variable: str


OPS = {
    "linear": OpSpec("linear", "gemv", "bf16_gemv", "ASTRAI_GEMV"),
    "swiglu": OpSpec("swiglu", "gemv", "bf16_swiglu", "ASTRAI_SWIGLU"),
}

_CHOICES = {op: (TORCH, spec.family) for op, spec in OPS.items()} | {
    "decode": (TORCH, "composed", "megakernel")
}
"""What `use` takes for each op; decode's are no kernels of one family (`astrai_core.decode`)."""

VARIABLES = {op: (spec.variable, ("0", "1", "auto")) for op, spec in OPS.items()} | {
    "decode": ("ASTRAI_DECODE", (*_CHOICES["decode"], "auto"))
}
"""The environment variable of each op, and its values."""

_context: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "astrai_use", default=MappingProxyType({})
)


@contextlib.contextmanager
def use(**implementations: str) -> Iterator[None]:
    """Demands an implementation for ops, in this thread or task, until the end of the block.

    ``with use(linear="gemv", swiglu="torch"): ...``. The demand is strict: a call that the
    implementation cannot serve raises RuntimeError with the reason. Blocks nest; the inner wins.

    What torch.compile has traced keeps the choice of the block that it was traced in: nothing
    traces it again when it runs in another.

    Args:
        implementations: for each op ``torch`` or, for ``linear`` and ``swiglu``, the name of its
            family; for ``decode`` ``composed`` or ``megakernel``.

    Raises:
        ValueError: an op or an implementation of another name.
    """
    for op, implementation in implementations.items():
        if op not in _CHOICES:
            raise ValueError(f"use: expected an op of {', '.join(_CHOICES)}, got {op!r}")
        if implementation not in _CHOICES[op]:
            allowed = ", ".join(_CHOICES[op])
            raise ValueError(f"{op}: expected one of {allowed}, got {implementation!r}")
    token = _context.set({**_context.get(), **implementations})
    try:
        yield
    finally:
        _context.reset(token)


class Call(NamedTuple):
    """What a decision depends on.

    Attributes:
        op: key of `OPS`.
        demanded: implementation that the context demands, or None.
        mode: value of the op's environment variable.
        gpu: CUDA device of x, -1 on another device.
        m: tokens: the product of x's leading dimensions.
        n: outputs.
        k: reduction length.
        obstacle: what keeps the kernel from this call whatever it is, or None. With one, device and
            sizes may be -1: no decision depends on them.
    """

    op: str
    demanded: str | None
    mode: str
    gpu: int
    m: int
    n: int
    k: int
    obstacle: str | None


class Decision(NamedTuple):
    """The outcome for a `Call`: `kernel` is None where torch runs."""

    chosen: str
    kernel: Callable[..., Any] | None
    passed_over: Mapping[str, str]


def describe(op: str, x: Tensor, n: int, obstacle: str | None) -> Call:
    """A `Call` of `op` on x, with the selection that is in force now."""
    if obstacle is not None:
        # Sizes would make the decisions many, and those of some operands cannot be asked or hashed.
        return Call(op, selected(op), mode(op), -1, -1, -1, -1, obstacle)
    k = x.shape[-1]
    return Call(
        op,
        selected(op),
        mode(op),
        x.get_device() if x.is_cuda else -1,
        x.numel() // k if k else 0,
        n,
        k,
        None,
    )


def selected(op: str) -> str | None:
    """The implementation that `use` demands for an op here, or None."""
    return _context.get().get(op)


def mode(op: str) -> str:
    """The value of the op's environment variable, one of `VARIABLES`; ``auto`` is the default.

    Raises:
        ValueError: the variable has another value.
    """
    variable, allowed = VARIABLES[op]
    value = os.environ.get(variable, "auto")
    if value not in allowed:
        expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise ValueError(f"{variable}: expected {expected}, got {value!r}")
    return value


def decide(call: Call) -> Decision:
    """The implementation for a call.

    Raises:
        RuntimeError: the context demands a kernel that cannot serve the call.
    """
    decision = _decide(call)
    if decision.kernel is None and decision.chosen != TORCH:
        reason = decision.passed_over[decision.chosen]
        raise RuntimeError(f"{call.op}: {decision.chosen} is demanded by use(): {reason}")
    return decision


@functools.lru_cache(maxsize=8192)
def _decide(call: Call) -> Decision:
    spec = OPS[call.op]
    if call.demanded == TORCH:
        return Decision(TORCH, None, {spec.family: "use() demands torch"})
    obstacle = _not_selected(call, spec) or call.obstacle or _unsupported(call)
    kernel = None
    if obstacle is None:
        kernel, obstacle = kernel_for(spec, call.gpu)
    if obstacle is None and call.demanded is None and call.mode == "auto":
        obstacle = _outside_table(call, spec)
    if obstacle is None:
        if call.demanded is not None:
            why = f"use() demands {spec.family}"
        elif call.mode == "1":
            why = f"{spec.variable}=1"
        else:
            why = "the measured table prefers the kernel"
        return Decision(spec.family, kernel, {TORCH: why})
    if call.demanded == spec.family:
        return Decision(spec.family, None, {spec.family: obstacle})
    return Decision(TORCH, None, {spec.family: obstacle})


@functools.lru_cache(maxsize=1024)
def kernel_for(spec: OpSpec, gpu: int) -> tuple[Callable[..., Any] | None, str | None]:
    """The op's kernel for a device, or why there is none."""
    family = discovery.find(spec.family)
    reason = family.reason_on(gpu)
    if reason is not None:
        return None, reason.text
    if "bfloat16" not in family.ops.get(spec.kernel, ()):
        what = f"{family.distribution} {family.version} has no {spec.kernel} for bfloat16"
        return None, f"{what}; pip install -U {family.distribution}"
    kernel = family.op(spec.kernel)
    return kernel, None if family.reason is None else family.reason.text


def _not_selected(call: Call, spec: OpSpec) -> str | None:
    if call.demanded is None and call.mode == "0":
        return f"{spec.variable}=0"
    return None


def _unsupported(call: Call) -> str | None:
    if call.gpu < 0:
        return "x is not on a CUDA device"
    if not 1 <= call.m <= MAX_TOKENS:
        return f"M = {call.m}: the kernel takes 1 to {MAX_TOKENS} tokens"
    if call.k > MAX_K or call.n > MAX_N:
        return f"N = {call.n}, K = {call.k}: the kernel takes N to {MAX_N} and K to {MAX_K}"
    if call.n < 1 or call.k < 1:
        return f"N = {call.n}, K = {call.k}: nothing to compute"
    if call.op == "swiglu" and call.k % 8:
        return f"K = {call.k} is not divisible by 8"
    return None


def _outside_table(call: Call, spec: OpSpec) -> str | None:
    capability = device.capability(call.gpu)
    if capability is None:
        return device.why_none()
    rows = [
        row
        for row in tables.rows_for(capability)
        if row.op == call.op and row.implementation == spec.family
    ]
    if any(row.covers(call.m, call.n, call.k) for row in rows):
        return None
    name = f"sm_{capability[0]}{capability[1]}"
    if not rows:
        return f"no measurement on {name} prefers the kernel ({spec.variable}=1 forces it)"
    return (
        f"M = {call.m}, N = {call.n}, K = {call.k} is outside the bands of {name} in which the "
        f"kernel is faster ({spec.variable}=1 forces it)"
    )


def obstacle_in(x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None) -> str | None:
    """What in the operands of a call rules a bf16 kernel out: the first thing, as a sentence."""
    grad = torch.is_grad_enabled()
    place = None
    for tensor in (x, *weights) if bias is None else (x, *weights, bias):
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            return f"{type(tensor).__name__} is no plain tensor"
        if tensor.dtype is not torch.bfloat16:
            return f"{str(tensor.dtype).removeprefix('torch.')} operands: the kernel takes bfloat16"
        if grad and tensor.requires_grad:
            return "training: an operand requires grad, and the kernel has no backward"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return "an operand is sparse or nested"
        # Another accelerator numbers its devices from 0 too.
        gpu = tensor.get_device() if tensor.is_cuda else -1
        if place is None:
            place = gpu
        elif gpu != place:
            return "operands on different devices"
    return observer() or _obstacle_in_layout(x, weights, bias)


def _obstacle_in_layout(x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None) -> str | None:
    if not x.is_contiguous():
        return "x is not contiguous"
    shape = weights[0].shape
    if x.shape[-1:] != shape[1:] or len(shape) != 2:
        return "the shapes do not fit"
    for weight in weights:
        if weight.shape != shape:
            return "the shapes do not fit"
        outer, inner = weight.stride()
        if inner != 1 or outer < shape[1]:
            return "the rows of a weight are not contiguous"
    if bias is not None:
        if bias.shape != shape[:1]:
            return "the shapes do not fit"
        if not bias.is_contiguous():
            return "bias is not contiguous"
    return None


# torch has no public questions for these; a torch that has lost one must still import this module.
_functorch: Any = getattr(torch._C, "_functorch", None)  # noqa: SLF001
_functorch_level = getattr(_functorch, "peek_interpreter_stack", lambda: None)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # noqa: SLF001
_jit_trace = getattr(torch._C, "_get_tracing_state", lambda: None)  # noqa: SLF001


def observer() -> str | None:
    """What would miss a call that torch does not see: a kernel's call passes its dispatcher by."""
    if torch.is_autocast_enabled("cuda"):
        return "autocast is active"
    if _dispatch_modes():
        return "a TorchDispatchMode is active"
    if _jit_trace() is not None:
        return "torch.jit.trace records the call"
    return transform()


def transform() -> str | None:
    """What would transform a call's operation: a kernel has no derivative and no batching rule."""
    if _functorch_level() is not None:
        return "functorch transforms the call"
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return "forward-mode differentiation is active"
    return None


def forget() -> None:
    """Drops all decisions and families; the next calls look at what is installed again."""
    _decide.cache_clear()
    kernel_for.cache_clear()
    discovery.forget()
