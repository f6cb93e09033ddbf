# SPDX-License-Identifier: Apache-2.0
"""An attention module's own forward, but with rotary embedding by `astrai_core.apply_rotary_emb`.

transformers' attention modules call a function of their file, ``apply_rotary_pos_emb``. A copy of
the forward that finds another function under this name changes one module and leaves the file, and
all other models, alone; and it is right for every release of transformers, whose forwards differ.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

import astrai_core

from ._traced import is_recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["rotary_obstacle", "with_rotary"]

_ROTARY, _INTERFACE = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"


def rotary_obstacle(kind: type) -> str | None:
    """Why `with_rotary` cannot copy the forward of an attention class; None if it can."""
    forward: Any = kind.__dict__.get("forward") or getattr(kind, "forward", None)
    inner: Any = inspect.unwrap(forward)
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    for name in (_ROTARY, _INTERFACE):
        if name not in names:
            return f"the forward of {kind.__name__} does not use {name}"
    function: Any = inspect.unwrap(inner.__globals__[_ROTARY])
    half: Any = getattr(function, "__globals__", {}).get("rotate_half")
    if not _is_copy(function, _llama_rotary, _llama_rotary_4) or not _is_copy(half, rotate_half):
        return f"the {_ROTARY} of {kind.__name__} is not that of Llama"
    while forward is not inner:
        if not any(_holds(cell, forward.__wrapped__) for cell in forward.__closure__ or ()):
            return f"the forward of {kind.__name__} is wrapped in what is not understood"
        forward = forward.__wrapped__
    return None


@functools.cache
def with_rotary(forward: Callable[..., Any]) -> Any:
    """The one copy of an attention's forward that calls `astrai_core.apply_rotary_emb`.

    Args:
        forward: of a class that `rotary_obstacle` has nothing against.
    """
    return _with_rotary(forward)


def _with_rotary(forward: Any) -> Any:
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        names = dict(forward.__globals__)
        names[_ROTARY] = _replacement(names[_ROTARY])
        return _copy(forward, names, forward.__closure__)
    copied = _with_rotary(inner)
    cells = (types.CellType(copied) if _holds(c, inner) else c for c in forward.__closure__)
    wrapper = _copy(forward, forward.__globals__, tuple(cells))
    wrapper.__wrapped__ = copied
    return wrapper


def _copy(function: Any, names: dict[str, Any], cells: tuple[Any, ...] | None) -> Any:
    copied = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, cells
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    del copied.__dict__["__wrapped__"]
    return copied


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    """Llama's function for as long as it is called as Llama calls it; else the original itself."""

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any
    ) -> Any:
        if args or options or not _fits(q, cos) or not _fits(k, sin):
            return original(q, k, cos, sin, *args, **options)
        angles = (_half(cos), _half(sin))
        q, k = (
            astrai_core.apply_rotary_emb(x.transpose(1, 2), angles, interleaved=False)
            for x in (q, k)
        )
        return q.transpose(1, 2), k.transpose(1, 2)

    return apply_rotary_pos_emb


def _fits(x: Tensor, table: Tensor) -> bool:
    """Whether x, bhld, is turned as a whole by angles that are there for all of its tokens."""
    return (
        x.dim() == 4
        and table.dim() == 3
        and table.shape[0] in (1, x.shape[0])
        and table.shape[1:] == (x.shape[2], x.shape[3])
        and x.shape[3] % 2 == 0
        and x.is_floating_point()
        and torch.promote_types(x.dtype, table.dtype) == x.dtype
    )


def _half(table: Tensor) -> Tensor:
    """Cos or sin of each pair, in fp32, of a table that has them twice.

    All layers of a pass get the same table, so that the result is kept on it: but not where it
    would be missing from a graph, nor longer than until the table is written to, which an
    inference tensor does not tell.
    """
    if is_recorded(table) or table.requires_grad or table.is_inference():
        return _converted(table)
    # What inference mode has made is of no use to autograd later.
    state = (table._version, torch.is_inference_mode_enabled())  # noqa: SLF001
    holder: Any = table
    kept: tuple[tuple[int, bool], Tensor] | None = getattr(holder, "_astrai_half", None)
    if kept is None or kept[0] != state:
        kept = (state, _converted(table))
        holder._astrai_half = kept  # noqa: SLF001 - our own
    return kept[1]


def _converted(table: Tensor) -> Tensor:
    wide = torch.float64 if table.dtype == torch.float64 else torch.float32
    return table[..., : table.shape[-1] // 2].to(wide).contiguous()


# --- what Llama's functions are, compared by their instructions -----------------------------------


def _is_copy(function: object, *known: Any) -> bool:
    if not isinstance(function, types.FunctionType):
        return False
    return any(_essence(function) == _essence(k) for k in known)


def _essence(function: types.FunctionType) -> tuple[Any, ...]:
    """What a function computes: all but its names, its annotations and its docstring."""
    code = function.__code__
    constants = [c for c in code.co_consts if c is not None and c != function.__doc__]
    return code.co_code, code.co_names, constants, function.__defaults__


def rotate_half(x: Any) -> Any:
    """The function of this name in transformers."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _llama_rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: Any = 1) -> Any:
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


# Its releases before 5 have an argument that nothing uses.
def _llama_rotary_4(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    position_ids: Any = None,  # noqa: ARG001
    unsqueeze_dim: Any = 1,
) -> Any:
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
