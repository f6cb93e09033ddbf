# SPDX-License-Identifier: Apache-2.0
"""Selects the backend of a call of attention: context > ``ASTR_BACKEND`` > cuda > flash > torch."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import inspect
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from astrai_core import recording

from .backends import (
    AttentionBackend,
    CudaBackend,
    FlashAttnBackend,
    Forward,
    TorchNativeBackend,
)
from .step import Step

__all__ = ["ATTN_BACKEND", "attention", "attn_backend", "get_backend"]

VARIABLE = "ASTR_BACKEND"

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of operands."""


class ATTN_BACKEND(str, enum.Enum):  # noqa: N801 (as its counterpart in torch is written)
    """The backends that come with this package, in the order of preference."""

    CUDA = "cuda"
    FLASH = "flash"
    TORCH_NATIVE = "torch_native"


Choice: TypeAlias = "ATTN_BACKEND | str | type[AttentionBackend] | AttentionBackend"

_BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend for backend in (CudaBackend(), FlashAttnBackend(), TorchNativeBackend())
}

_context: contextvars.ContextVar[AttentionBackend | None] = contextvars.ContextVar(
    "astrai_attn_backend", default=None
)


@contextlib.contextmanager
def attn_backend(backend: Choice) -> Iterator[AttentionBackend]:
    """Demands a backend for `attention`, in this thread or task, until the end of the block.

    The demand is strict: a call that the backend cannot serve raises RuntimeError with the reason.
    Blocks nest; the inner wins.

    What torch.compile has traced keeps the demand of the block that it was traced in, torch's or
    none: nothing traces it again when it runs in another.

    Args:
        backend: an `ATTN_BACKEND`, its value, or an `AttentionBackend` class or instance.

    Yields:
        The backend.

    Raises:
        ValueError: it is none of these, or an abstract class.
    """
    chosen = _resolve(backend)
    token = _context.set(chosen)
    try:
        yield chosen
    finally:
        _context.reset(token)


def get_backend() -> AttentionBackend:
    """The backend in force here: of the context, the environment, or the first that can be used.

    `attention` may choose another for a call that this one cannot serve, unless the context
    demands it.

    Raises:
        ValueError: ``ASTR_BACKEND`` has another value than cuda, flash or torch_native.
    """
    demanded = _context.get()
    if demanded is not None:
        return demanded
    return next(backend for backend in _order(_variable()) if backend.unavailable() is None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Step | None = None,
    layer_id: int = 0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    fwd: Forward | None = None,
) -> Tensor:
    """Softmax attention with grouped heads, scaled by ``1 / sqrt(head_dim)``.

    The backend is that of `attn_backend`, else the first of ``ASTR_BACKEND``, cuda, flash and
    torch_native that can serve the call. `explain` says which and why. Under torch.compile it is
    torch_native: a demand for another, or another value of the variable, is an error while it
    traces, and is not noticed when what it has traced runs again.

    With a cache, k and v are stored in the step's layer, and the queries attend over all tokens of
    their sequences, which then include them. Operands that do not fit are stored nowhere.

    q, k and v are float64, float32, float16 or bfloat16, all three of one dtype (autocast may make
    them so) and on one device.

    Args:
        q: ``[batch, q_len, heads, head_dim]``; with a cache, ``[B, L, heads, head_dim]`` where each
            of the step's sequences has L new tokens, or ``[1, total_q, heads, head_dim]``: the
            sequences one after the other.
        k: ``[batch, kv_len, kv_heads, head_dim]``; with a cache, for the tokens of q. A key head
            serves ``heads / kv_heads`` consecutive query heads.
        v: like k.
        kv_cache: what `PagedKVCache.begin_step` returned, or None.
        layer_id: the layer of the cache.
        attn_mask: bool, True where a query may attend: ``[batch, kv_len]``,
            ``[batch, q_len, kv_len]`` or ``[batch, 1, q_len, kv_len]``; with a cache for the
            longest q_len and kv_len of the step. A query that may attend to nothing gives zeros.
        is_causal: a query attends to no key after its token; the last query is at the last key.
        fwd: ``decode`` (one query a sequence), ``prefill``, or None: a training call, or with a
            cache what the step is.

    Returns:
        Of q's shape, contiguous.

    Raises:
        RuntimeError: `attn_backend` demands a backend that cannot serve the call; the step is
            outdated.
        ValueError: operands that do not fit, another `fwd`, another value of ``ASTR_BACKEND``.
        TypeError: kv_cache is no step, such as the cache itself.
        IndexError: the cache has no such layer.
    """
    _check(q, k, v, kv_cache, layer_id, attn_mask, fwd)
    call = (q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd)
    if torch.compiler.is_compiling():
        # It needs torch._dynamo, whose import takes a second.
        from . import _traced

        return _traced.attention(call)
    return _select(call).forward(*call)


def _select(call: tuple[Any, ...]) -> AttentionBackend:
    """The backend for a call, recorded for `explain`."""
    demanded = _context.get()
    passed_over: dict[str, str] = {}
    if demanded is not None:
        reason = demanded.why_not(*call)
        if reason is not None:
            raise RuntimeError(
                f"attention: {demanded.name} is demanded by attn_backend(): {reason}"
            )
        chosen, why = demanded, f"attn_backend() demands {demanded.name}"
    else:
        variable = _variable()
        for backend in _order(variable):
            reason = backend.why_not(*call)
            if reason is None:
                break
            passed_over[backend.name] = reason
        chosen = backend  # torch_native, the last one, serves every call
        why = f"{VARIABLE}={variable}" if chosen.name == variable else f"{chosen.name} comes first"
    if reports := recording.active():
        others = {n: why for n in _BACKENDS if n not in passed_over and n != chosen.name}
        _record(reports, call, chosen.name, passed_over | others)
    return chosen


def _record(
    reports: tuple[recording.Report, ...],
    call: tuple[Any, ...],
    chosen: str,
    passed_over: dict[str, str],
) -> None:
    q, k, _, step, _, mask, is_causal, fwd = call
    # Not how much is cached: each decoded token would have a row of its own.
    keys = recording.shape_of(k)
    if step is None and q.dim() == 4 and q.shape[1] == 1:
        keys = f"[{k.shape[0]}, any, {k.shape[2]}, {k.shape[3]}]"
    words = [f"q {recording.shape_of(q)} k, v {keys}"]
    words += ["cache"] * (step is not None) + ["mask"] * (mask is not None)
    words += ["causal"] * is_causal + [fwd] * (fwd is not None)
    dtype = str(q.dtype).removeprefix("torch.")
    recording.record(
        reports, "attention", " ".join(words), dtype, str(q.device), chosen, passed_over
    )


def note_elsewhere(call: tuple[Any, ...], name: str, reason: str) -> None:
    """Records a call of attention that a caller gives to something else.

    Args:
        call: the operands, as `attention` has them.
        name: what computes it instead, by way of torch.
        reason: why `attention` cannot.

    Raises:
        RuntimeError: the context demands a backend, and not torch's.
        ValueError: as `get_backend`.
    """
    if demanded := other_than_torch():
        raise RuntimeError(f"attention: {demanded} is demanded by attn_backend(): {reason}")
    if reports := recording.active():
        _record(reports, call, name, dict.fromkeys(_BACKENDS, reason))


def other_than_torch() -> str:
    """Name of the backend that the context demands; empty without one, or where it is torch's own.

    Raises:
        ValueError: as `get_backend`.
    """
    demanded = _context.get()
    if demanded is None:
        _variable()
        return ""
    if type(demanded) is TorchNativeBackend:
        return ""
    # A subclass may have its name too.
    kind = type(demanded).__name__
    return kind if demanded.name == TorchNativeBackend.name else demanded.name


def _resolve(backend: Any) -> AttentionBackend:
    if isinstance(backend, AttentionBackend):
        return backend
    if isinstance(backend, type) and issubclass(backend, AttentionBackend):
        if inspect.isabstract(backend):
            raise ValueError(f"attn_backend: {backend.__name__} is abstract, it has no forward")
        return backend()
    if isinstance(backend, str) and backend in _BACKENDS:
        return _BACKENDS[backend]
    raise ValueError(
        f"attn_backend: expected {', '.join(_BACKENDS)}, or an AttentionBackend class or instance, "
        f"got {backend!r}"
    )


def _variable() -> str | None:
    value = os.environ.get(VARIABLE)
    if value is not None and value not in _BACKENDS:
        raise ValueError(f"{VARIABLE}: expected {', '.join(_BACKENDS)}, got {value!r}")
    return value


def _order(first: str | None) -> list[AttentionBackend]:
    return sorted(_BACKENDS.values(), key=lambda backend: backend.name != first)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step | None,
    layer_id: int,
    mask: Tensor | None,
    fwd: str | None,
) -> None:
    AttentionBackend._check_fwd(fwd)  # noqa: SLF001
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [batch, length, heads, head_dim], got {[*x.shape]}")
    if k.shape != v.shape:
        raise ValueError(f"v: expected k's shape {[*k.shape]}, got {[*v.shape]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: expected head_dim {q.shape[-1]} as q has it, got {k.shape[-1]}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"k: expected a divisor of q's {q.shape[2]} heads, got {k.shape[2]}")
    if step is not None:
        _check_step(step, layer_id, q, k, v)
    _check_place(q, k, v, mask)
    if step is not None:
        batch, q_len, kv_len = len(step.seqs), step.max_q_len, step.max_kv_len
    elif q.shape[0] != k.shape[0]:
        raise ValueError(f"k: expected batch {q.shape[0]} as q has it, got {k.shape[0]}")
    else:
        batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    if fwd == "decode" and q_len != 1:
        raise ValueError(f"fwd: 'decode' is for one query a sequence, got {q_len}")
    if mask is not None:
        shapes = [(batch, kv_len), (batch, q_len, kv_len), (batch, 1, q_len, kv_len)]
        if mask.dtype is not torch.bool or tuple(mask.shape) not in shapes:
            expected = ", ".join(str([*shape]) for shape in shapes)
            raise ValueError(
                f"attn_mask: expected bool of shape {expected}, got {mask.dtype} {[*mask.shape]}"
            )


def _check_step(step: Any, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    if not isinstance(step, Step):
        found = type(step).__name__
        raise TypeError(f"kv_cache: pass what PagedKVCache.begin_step() returns, got {found}")
    step.check(layer_id, k, v)
    step.packed("q", q)


def _check_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Dtypes and devices, of which a cache has judged k's."""
    if k.dtype not in DTYPES:
        raise ValueError(f"k: expected one of {', '.join(map(str, DTYPES))}, got {k.dtype}")
    for name, x in (("q", q), ("v", v)):
        if x.dtype != k.dtype and not _autocast_joins(x, k):
            raise ValueError(f"{name}: expected {k.dtype} as k has it, got {x.dtype}")
    others = (("q", q), ("v", v)) if mask is None else (("q", q), ("v", v), ("attn_mask", mask))
    for name, x in others:
        if x.device != k.device:
            raise ValueError(f"{name}: expected on {k.device} as k is, got on {x.device}")


def _autocast_joins(*operands: Tensor) -> bool:
    """Whether autocast gives torch's attention operands of one dtype; it leaves float64 alone."""
    kind = operands[0].device.type
    return (
        all(x.dtype in DTYPES[1:] for x in operands)
        and torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
    )
