# SPDX-License-Identifier: Apache-2.0
"""Checks of single values, by the name that the caller knows them by."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["indices", "no_autocast", "number", "positive", "require", "tensor"]


def require(name: str, mapping: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Checks that a dict has keys.

    Raises:
        TypeError: it is no dict.
        ValueError: a key is missing.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name}: expected a dict, got {type(mapping).__name__}")
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise ValueError(f"{name}: expected the keys {', '.join(missing)}, got {[*mapping]}")


def positive(name: str, value: Any) -> int:
    """An int from 1 on.

    Raises:
        TypeError: it is no int.
        ValueError: it is below 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value


def number(name: str, value: Any) -> float:
    """A finite float.

    Raises:
        TypeError: it is neither an int nor a float.
        ValueError: it is infinite, NaN, or too large for a float.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name}: expected a finite number, got {found}")
    return found


def tensor(
    name: str,
    value: Any,
    shape: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """A tensor of a shape, where None stands for any size; without its autograd graph.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device; sparse, nested, or without memory.
    """
    x = _strided(name, value)
    fits = x.dim() == len(shape) and all(
        want in (None, size) for size, want in zip(x.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got {[*x.shape]}")
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got {x.device}")
    if x.is_meta:
        raise ValueError(f"{name}: expected a tensor with memory, got one on meta")
    return x.detach()


def indices(
    name: str, x: Any, shapes: Sequence[tuple[int, ...]], device: torch.device, count: int
) -> None:
    """Checks int64 numbers from 0 to ``count - 1``; their values on the CPU alone.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device, or, on the CPU, a number out of range.
    """
    x = _strided(name, x)
    if tuple(x.shape) not in shapes:
        expected = " or ".join(str([*shape]) for shape in shapes)
        raise ValueError(f"{name}: expected shape {expected}, got {[*x.shape]}")
    if x.dtype != torch.int64:
        raise TypeError(f"{name}: expected torch.int64, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got {x.device}")
    if device.type == "cpu":
        low, high = (int(bound) for bound in x.aminmax())
        if low < 0 or high >= count:
            found = str(low) if low == high else f"{low} to {high}"
            raise ValueError(f"{name}: expected 0 to {count - 1}, got {found}")


def _strided(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        found = "a nested one" if value.is_nested else value.layout
        raise ValueError(f"{name}: expected a strided tensor, got {found}")
    return value


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keeps autocast, which changes dtypes that decode has promised, from a device's operators."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
