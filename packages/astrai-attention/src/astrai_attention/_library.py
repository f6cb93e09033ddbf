# SPDX-License-Identifier: Apache-2.0
"""The ops as torch operators (`torch.ops.astrai_attention`), for torch.compile only.

An eager call through the dispatcher costs 8 us more than one of the compiled module, so the public
functions come here only while torch.compile traces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ._native import native
from ._transforms import refuse_forward_mode, refuse_transform

_NO_BACKWARD = (
    "an input requires grad, and this op has no backward; "
    "call it under torch.no_grad() or torch.inference_mode()"
)

_lib = Library("astrai_attention", "DEF")


def _fake_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Checks what a trace can know; the compiled module checks the rest when it runs."""
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x: expected dtype bfloat16, got {x.dtype}")
    if x.dim() not in (3, 4):
        raise ValueError(
            "x: expected shape [tokens, heads, head_dim] or [batch, seq, heads, head_dim], "
            f"got {x.dim()}-D {list(x.shape)}"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32:
            raise TypeError(f"{name}: expected dtype float32, got {table.dtype}")
        if not 2 <= table.dim() < x.dim() or table.shape[-1] * 2 != x.shape[-1]:
            raise ValueError(
                f"{name}: expected shape [{'tokens' if x.dim() == 3 else 'seq'}, "
                f"{x.shape[-1] // 2}] (half of head_dim of x), got {list(table.shape)}"
            )
    return x.new_empty(x.shape)


def _fake_out(*_: Any) -> None:
    return None


def _refuse_backward(ctx: Any, inputs: Any, output: Any) -> None:
    raise RuntimeError(_NO_BACKWARD)


def _unreachable_backward(ctx: Any, *grads: Any) -> None:
    raise AssertionError("setup_context raised before a backward could be recorded")


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    layout: torch.Tag = torch.Tag.needs_fixed_stride_order,
) -> None:
    name = schema.partition("(")[0]

    def checked(*operands: Any) -> Any:
        refuse_forward_mode()
        return run(*operands)

    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, layout))
    _lib.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"astrai_attention::{name}", fake, lib=_lib)
    if "!" not in schema:
        torch.library.register_autograd(
            f"astrai_attention::{name}",
            _unreachable_backward,
            setup_context=_refuse_backward,
            lib=_lib,
        )


register(
    "rotary_emb(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    lambda x, cos, sin, interleaved: native.rotary_emb(x, cos, sin, interleaved, None),
    _fake_rotary,
)
register(
    "rotary_emb_out(Tensor x, Tensor cos, Tensor sin, bool interleaved, Tensor(a!) out) -> ()",
    lambda x, cos, sin, pairs, out: (native.rotary_emb(x, cos, sin, pairs, out), None)[1],
    _fake_out,
)
# An argument that is written is declared once: `out` may not alias `x` in the operator above.
register(
    "rotary_emb_(Tensor(a!) x, Tensor cos, Tensor sin, bool interleaved) -> ()",
    lambda x, cos, sin, pairs: (native.rotary_emb(x, cos, sin, pairs, x), None)[1],
    _fake_out,
)


def refuse_grad(*tensors: Tensor | None) -> None:
    # The operators that write into an argument cannot register a backward that raises.
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(_NO_BACKWARD)
    # Raised in traced code this would be a graph break, and the eager call may take the operands.
    refuse_transform()


def rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor | None
) -> Tensor:
    refuse_grad(x, cos, sin, out)
    if out is None:
        result: Tensor = torch.ops.astrai_attention.rotary_emb(x, cos, sin, interleaved)
        return result
    if out is x:
        torch.ops.astrai_attention.rotary_emb_(x, cos, sin, interleaved)
        return x
    torch.ops.astrai_attention.rotary_emb_out(x, cos, sin, interleaved, out)
    return out


# --- attention ------------------------------------------------------------------------------------

Results = Tensor | tuple[Tensor, Tensor]


def run_native(name: str, *operands: Any) -> Any:
    # Looked up at the call: without a compiled module, importing this must not fail.
    return getattr(native, name)(*operands)


def register_attention(
    name: str,
    arguments: str,
    run: Callable[..., Any],
    fake: Callable[..., tuple[Tensor, Tensor]],
    scratch: Sequence[str] = (),
) -> None:
    """Two operators: `name`, which returns an output and log-sum-exps, and `name`_out.

    The former computes log-sum-exps that nobody asked for too, at most 1/16 of the output's bytes:
    less than a third operator is worth.
    The latter writes into what it is given, of which `lse` and `scratch` may be None.

    Args:
        name: of the operators.
        arguments: the part of the schema that both have.
        run: takes those, ``return_lse``, ``out``, ``lse`` and `scratch`.
        fake: takes those.
        scratch: names of further tensors that are written.
    """
    # V has the strides of K, and rows start on 16 bytes: the order of the strides is not enough.
    layout = torch.Tag.needs_exact_strides
    nothing = (None,) * len(scratch)

    def run_out(*operands: Any) -> None:
        first = len(operands) - 2 - len(scratch)
        run(*operands[:first], operands[first + 1] is not None, *operands[first:])

    register(
        f"{name}({arguments}) -> (Tensor, Tensor)",
        lambda *a: run(*a, True, None, None, *nothing),
        fake,
        layout,
    )
    written = "".join(f", Tensor({x}!)? {x}" for x in ("lse", *scratch))
    register(
        f"{name}_out({arguments}, Tensor(out!) out{written}) -> ()",
        run_out,
        lambda *a: (fake(*a[: -2 - len(scratch)]), None)[1],
        layout,
    )


def call_attention(
    name: str,
    arguments: Sequence[Any],
    lse_shape: Sequence[int],
    return_lse: bool,
    out: Tensor | None,
    lse: Tensor | None,
    *scratch: Tensor | None,
) -> Results:
    """The operators of `register_attention`, with what is not given allocated."""
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: expected a bool, got {type(return_lse).__name__}")
    refuse_grad(*(x for x in arguments if isinstance(x, Tensor)), out, lse)
    ops = torch.ops.astrai_attention
    with_lse = return_lse or lse is not None
    if all(x is None for x in (out, lse, *scratch)):
        made: tuple[Tensor, Tensor] = getattr(ops, name)(*arguments)
        return made if with_lse else made[0]
    q: Tensor = arguments[0]
    out = q.new_empty(q.shape) if out is None else out
    if with_lse and lse is None:
        lse = q.new_empty(lse_shape, dtype=torch.float32)
    getattr(ops, f"{name}_out")(*arguments, out, lse, *scratch)
    return out if lse is None else (out, lse)


def _check_heads(q: Tensor, k: Tensor, v: Tensor, names: Sequence[str], layout: str) -> None:
    """Checks what a trace can know; the compiled module checks the rest when it runs."""
    for name, x in zip(names, (q, k, v), strict=True):
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name}: expected dtype bfloat16, got {x.dtype}")
    if q.dim() != layout.count(",") + 1:
        raise ValueError(f"{names[0]}: expected shape {layout}, got {q.dim()}-D {list(q.shape)}")
    for name, x in zip(names[1:], (k, v), strict=True):
        if x.dim() != 4 or x.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"{name}: expected four dimensions, the last of {q.shape[-1]} (head_dim of q), "
                f"got {list(x.shape)}"
            )


def _prefill_lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def _fake_prefill(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    _check_heads(q, k, v, ("q", "k", "v"), "[batch, q_len, q_heads, head_dim]")
    return q.new_empty(q.shape), q.new_empty(_prefill_lse_shape(q), dtype=torch.float32)


def _fake_paged_prefill(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    names = ("q", "k_pool", "v_pool")
    _check_heads(q, k_pool, v_pool, names, "[total_q, q_heads, head_dim]")
    return q.new_empty(q.shape), q.new_empty(_prefill_lse_shape(q), dtype=torch.float32)


register_attention(
    "attn_prefill",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float? scale",
    partial(run_native, "attn_prefill"),
    _fake_prefill,
)
register_attention(
    "attn_paged_prefill",
    "Tensor q, Tensor k_pool, Tensor v_pool, Tensor page_table, Tensor qo_indptr, "
    "Tensor kv_indptr, Tensor q_tile_to_batch, Tensor q_tile_to_index, int page_size, "
    "bool is_causal, float? scale",
    partial(run_native, "attn_paged_prefill"),
    _fake_paged_prefill,
)


def attn_prefill(*arguments: Any) -> Results:
    *rest, return_lse, out, lse = arguments
    shape = _prefill_lse_shape(rest[0])
    return call_attention("attn_prefill", rest, shape, return_lse, out, lse)


def attn_paged_prefill(*arguments: Any) -> Results:
    *rest, return_lse, out, lse = arguments
    shape = _prefill_lse_shape(rest[0])
    return call_attention("attn_paged_prefill", rest, shape, return_lse, out, lse)
