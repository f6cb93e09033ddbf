# SPDX-License-Identifier: Apache-2.0
"""One real call of every op, compared with float64: what the doctor does on each device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import recording
from .attn import PagedKVCache, apply_rotary_emb, attention, attn_backend
from .attn.backends import Forward
from .decode import build_model, decode_step, teardown
from .decode._select import COMPOSED, COMPOSED_KERNELS, MEGAKERNEL, supports
from .decode._torch import rms_norm
from .discovery import find
from .ops import linear, swiglu
from .policy import OPS, TORCH, VARIABLES, OpSpec, kernel_for, use
from .reasons import one_line
from .recording import explain

__all__ = ["Check", "checks_on"]

_M, _N, _K = 2, 256, 512
_NORM = OpSpec("add_rms_norm", "gemv", "add_rms_norm", VARIABLES["decode"][0])
_BATCH, _KEYS, _HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE = 2, 33, 4, 2, 64, 16


@dataclass(frozen=True)
class Check:
    """One real call of an op on a device.

    Attributes:
        op: name of the op; of attention and add_rms_norm, the kernel's.
        device: where it ran.
        demanded: the implementation that was demanded, ``auto`` if none was.
        chosen: the implementation that ran, None where the call failed.
        passed_over: why the other ones did not run.
        error: what is wrong, None if the result is right.
        relative_error: root mean square error over that of the float64 reference.
    """

    op: str
    device: str
    demanded: str
    chosen: str | None
    passed_over: dict[str, str]
    error: str | None
    relative_error: float | None


_Kernels = Mapping[str, Mapping[str, tuple[str, ...]]]
_Call = Callable[[torch.device], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Case:
    """A call to make.

    Attributes:
        op: what the check is called.
        recorded: what `explain` calls the op.
        call: makes the call on a device; the result, and the same in float64.
        kernels: of each implementation that can be demanded, the ops that it needs, by family.
        demand: selects one of them; None where nothing does.
    """

    op: str
    recorded: str
    call: _Call
    kernels: _Kernels
    demand: Callable[[str], Any] | None


def checks_on(place: torch.device) -> list[Check]:
    """The checks of a device.

    Every op is called as it would be by itself, and once more with each kernel demanded that is
    there but was not chosen. Attention and add_rms_norm are called where their family has the
    kernel in question.
    """
    found = []
    for case in _cases():
        first = _check(case, place, None)
        found.append(first)
        for implementation, needed in case.kernels.items():
            there = all(_has(family, ops) for family, ops in needed.items())
            if not there or not all(_usable(family, place) for family in needed):
                continue
            # The megakernel may be made for other models than this one.
            out_of_scope = implementation == MEGAKERNEL and not (
                first.error is None and supports(*_model_arguments(place))
            )
            if first.chosen != implementation and not out_of_scope:
                found.append(_check(case, place, implementation))
    return found


def _has(family: str, ops: tuple[str, ...]) -> bool:
    return all("bfloat16" in find(family).ops.get(op, ()) for op in ops)


def _usable(family: str, place: torch.device) -> bool:
    return place.type == "cuda" and find(family).reason_on(place.index) is None


def _cases() -> list[_Case]:
    calls = {"linear": _linear, "swiglu": _swiglu}
    cases = [
        _Case(op, op, calls[op], {spec.family: {spec.family: (spec.kernel,)}}, _user(op))
        for op, spec in OPS.items()
    ]
    if _NORM.kernel in find(_NORM.family).ops:
        cases.append(_Case(_NORM.name, _NORM.name, _add_rms_norm, {}, None))
    attentions: dict[str, _Call] = {
        "attn_decode": _decode,
        "attn_paged_decode": partial(_paged, new=1, fwd="decode"),
        "attn_paged_prefill": partial(_paged, new=_KEYS - _PAGE_SIZE, fwd="prefill"),
        "attn_prefill": _prefill,
    }
    there = find("attention").ops
    cases += [
        _Case(op, "attention", call, {"cuda": {"attention": (op,)}}, attn_backend)
        for op, call in attentions.items()
        if op in there
    ]
    if "rotary_emb" in there:
        cases.append(_Case("rotary_emb", "rotary_emb", _rotary, {}, None))
    whole: _Kernels = {COMPOSED: COMPOSED_KERNELS, MEGAKERNEL: {MEGAKERNEL: ("decode",)}}
    return [*cases, _Case("decode", "decode", _model, whole, _user("decode"))]


def _user(op: str) -> Callable[[str], Any]:
    return lambda implementation: use(**{op: implementation})


def _check(case: _Case, place: torch.device, demanded: str | None) -> Check:
    where, how = str(place), demanded or "auto"
    passed_over: dict[str, str] = {}
    selection: Any = contextlib.nullcontext()
    try:
        if demanded is not None and case.demand is not None:
            selection = case.demand(demanded)
        with torch.no_grad(), explain() as report, selection:
            y, exact = case.call(place)
        row = next(row for row in report.rows if row.op == case.recorded)
        passed_over = dict(row.passed_over)
        relative = float((y.double() - exact).norm() / exact.norm())
    except Exception as error:  # noqa: BLE001 (the report is about whatever went wrong)
        return Check(case.op, where, how, None, passed_over, one_line(error), None)
    # bf16 operands are exact here; the outputs' roundings are 2^-9 each.
    wrong = None if relative < 1e-2 else f"relative error {relative:.3g}, expected below 0.01"
    return Check(case.op, where, how, row.chosen, passed_over, wrong, relative)


def _operands(place: torch.device, *shapes: tuple[int, ...], scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator) * scale for s in shapes]
    return [value.to(place, torch.bfloat16) for value in values]


def _linear(place: torch.device) -> tuple[Tensor, Tensor]:
    x, weight = _operands(place, (_M, _K), (_N, _K), scale=_K**-0.25)
    return linear(x, weight), x.double() @ weight.double().T


def _swiglu(place: torch.device) -> tuple[Tensor, Tensor]:
    x, up, gate = _operands(place, (_M, _K), (_N, _K), (_N, _K), scale=_K**-0.25)
    g = x.double() @ gate.double().T
    return swiglu(x, up, gate), x.double() @ up.double().T * g * torch.sigmoid(g)


def _add_rms_norm(place: torch.device) -> tuple[Tensor, Tensor]:
    """Both results, one after the other. Only composed decode has the op, and never by torch."""
    x, residual, weight = _operands(place, (_M, _K), (_M, _K), (_K,))
    run, why = kernel_for(_NORM, x.get_device())
    chosen = TORCH if run is None else _NORM.family
    over = {_NORM.family: str(why)} if run is None else {TORCH: "the kernel can serve the call"}
    recording.record(
        recording.active(), _NORM.name, f"x [{_M}, {_K}]", "bfloat16", str(place), chosen, over
    )
    if run is None:
        s = x + residual
        y = rms_norm(s, weight, 1e-5)
    else:
        y, s = run(x, residual, weight, 1e-5)
    exact = x.double() + residual.double()
    scale = (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return torch.cat((y, s)), torch.cat((weight.double() * exact * scale, exact))


def _attention_operands(place: torch.device) -> list[Tensor]:
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    return _operands(place, *((_BATCH, _KEYS, h, _HEAD_DIM) for h in heads))


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, the last query at the last key."""
    k, v = (x.double().repeat_interleave(_HEADS // _KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("blhd,bshd->bhls", q.double(), k) * _HEAD_DIM**-0.5
    past = k.shape[1] - q.shape[1]
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(past)
    return torch.einsum("bhls,bshd->blhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def _decode(place: torch.device) -> tuple[Tensor, Tensor]:
    q, k, v = _attention_operands(place)
    q = q[:, -1:].contiguous()
    return attention(q, k, v, fwd="decode"), _exact(q, k, v)


def _prefill(place: torch.device) -> tuple[Tensor, Tensor]:
    q, k, v = _attention_operands(place)
    return attention(q, k, v, is_causal=True, fwd="prefill"), _exact(q, k, v)


def _paged(place: torch.device, new: int, fwd: Forward) -> tuple[Tensor, Tensor]:
    """The last `new` tokens of each sequence, over a cache of those before."""
    q, k, v = _attention_operands(place)
    q = q[:, -new:].contiguous()
    pages = _BATCH * -(-_KEYS // _PAGE_SIZE)
    cache = PagedKVCache(1, pages, _PAGE_SIZE, _KV_HEADS, _HEAD_DIM, device=place)
    seqs = [cache.new_sequence() for _ in range(_BATCH)]
    cache.begin_step(seqs, _KEYS - new).write(0, k[:, :-new], v[:, :-new])
    step = cache.begin_step(seqs, new)
    y = attention(q, k[:, -new:], v[:, -new:], step, is_causal=True, fwd=fwd)
    return y, _exact(q, k, v)


def _rotary(place: torch.device) -> tuple[Tensor, Tensor]:
    x, _, _ = _attention_operands(place)
    rates = 10000.0 ** -torch.linspace(0, 1, _HEAD_DIM // 2)
    angles = (torch.arange(_KEYS)[:, None] * rates).to(place)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.double().chunk(2, -1)
    c, s = (angle.double()[:, None] for angle in (cos, sin))
    exact = torch.cat((a * c - b * s, b * c + a * s), -1)
    return apply_rotary_emb(x, (cos, sin), interleaved=False), exact


def _model_arguments(place: torch.device) -> tuple[dict[str, Any], Any, dict[str, Any], int]:
    """A model of one layer, over a contiguous cache of random keys and values."""
    d, q, kv = _K, _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    shapes = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
    shapes |= {"gate": (_N, d), "up": (_N, d), "down": (d, _N)}
    values = _operands(place, *shapes.values(), scale=d**-0.5)
    embed, in_norm, post_norm, final_norm = _operands(place, (_N, d), (d,), (d,), (d,))
    layer = dict(zip(shapes, values, strict=True), in_norm=in_norm, post_norm=post_norm)
    caches = [x.transpose(1, 2).contiguous() for x in _attention_operands(place)[1:]]
    sizes = {"layers": 1, "d": d, "ffn": _N, "n_q": _HEADS, "n_kv": _KV_HEADS, "hd": _HEAD_DIM}
    cfg = {**sizes, "vocab": _N, "eps": 1e-5, "theta": 1e4, "wdtype": "bf16"}
    weights = {"embed": embed, "final_norm": final_norm, "layers": [layer]}
    return weights, [tuple(caches)], cfg, _KEYS


def _model(place: torch.device) -> tuple[Tensor, Tensor]:
    weights, caches, cfg, tokens = _model_arguments(place)
    ids = torch.arange(_BATCH, device=place)
    exact = _exact_model(weights, caches[0], ids)
    handle = build_model(weights, caches, cfg, tokens)
    logits = decode_step(handle, ids, _KEYS - 1)
    teardown(handle)
    return logits, exact


def _exact_model(weights: dict[str, Any], caches: tuple[Tensor, ...], ids: Tensor) -> Tensor:
    """`_model` in float64, with the tokens at the last position of the cache."""
    embed: Tensor = weights["embed"]
    w = {name: x.double() for name, x in weights["layers"][0].items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

    def turned(x: Tensor) -> Tensor:
        rates = 1e4 ** -torch.linspace(0, 1, _HEAD_DIM // 2 + 1, device=x.device)[:-1].double()
        angles = (_KEYS - 1) * rates
        a, b = x.chunk(2, -1)
        c, s = angles.cos(), angles.sin()
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    x = embed[ids].double()
    h = norm(x, w["in_norm"])
    q, k, v = ((h @ w[name].T).unflatten(-1, (-1, _HEAD_DIM)) for name in "qkv")
    k, v = (
        torch.cat((old.double().transpose(1, 2)[:, :-1], new[:, None]), 1)
        for old, new in zip(caches, (turned(k), v), strict=True)
    )
    x = x + _exact(turned(q)[:, None], k, v).flatten(1) @ w["o"].T
    h = norm(x, w["post_norm"])
    gate = h @ w["gate"].T
    x = x + (gate * gate.sigmoid() * (h @ w["up"].T)) @ w["down"].T
    return norm(x, weights["final_norm"]) @ embed.double().T
