# SPDX-License-Identifier: Apache-2.0
"""Values of a dataclass that are not of the types that its fields are annotated with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


def mistyped(value: Any) -> Iterator[tuple[str, str]]:
    """Field and sentence of each that is of another type; of those in its dataclasses too.

    An int will do for a float, which must be finite; a bool is no int.
    """
    hints = get_type_hints(type(value))
    for field in fields(value):
        got = getattr(value, field.name)
        if not fits(got, hints[field.name]):
            yield field.name, f"{field.name}: expected {field.type}, got {got!r}"
        elif is_dataclass(got):
            yield from ((field.name, f"{field.name}.{text}") for _, text in mistyped(got))


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type as annotated: a class, a union, a list or a dict."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is UnionType:
        return any(fits(value, arg) for arg in args)
    if origin is list:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(key, args[0]) and fits(item, args[1]) for key, item in value.items()
        )
    if hint is float:
        return fits(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
