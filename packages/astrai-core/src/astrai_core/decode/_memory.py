# SPDX-License-Identifier: Apache-2.0
"""Whether tensors have memory in common, element by element: pools may lie between each other."""

from __future__ import annotations

from torch import Tensor

__all__ = ["extent", "extents_meet", "is_distinct", "share"]

_Dims = list[tuple[int, int]]


def extent(x: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the one after its last."""
    return x.data_ptr(), x.data_ptr() + 1 + _span(_dims(x))


def extents_meet(a: Tensor, b: Tensor) -> bool:
    """Whether one of two tensors begins before the other ends."""
    (a_start, a_end), (b_start, b_end) = extent(a), extent(b)
    return a_start < b_end and b_start < a_end


def is_distinct(x: Tensor) -> bool:
    """Whether each element has a place of its own.

    False too for strides of which none spans those below it, which no layout of a cache has.
    """
    dims = _dims(x)
    return all(stride > _span(dims[i + 1 :]) for i, (stride, _) in enumerate(dims))


def share(a: Tensor, b: Tensor) -> bool:
    """Whether two distinct tensors, none of them empty, have a byte in common.

    True too where they lie between each other and have different strides, which no cache does.
    """
    if not extents_meet(a, b):
        return False
    dims = _dims(a)
    return dims != _dims(b) or _reaches(b.data_ptr() - a.data_ptr(), dims)


def _dims(x: Tensor) -> _Dims:
    """Stride in bytes, and size, of each dimension, the widest first; the last are the bytes."""
    item = x.element_size()
    dims = [(stride * item, n) for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1]
    return [*sorted(dims, reverse=True), (1, item)]


def _span(dims: _Dims) -> int:
    return sum((size - 1) * stride for stride, size in dims)


def _reaches(distance: int, dims: _Dims) -> bool:
    """Whether two elements of a tensor can be that far apart.

    Each stride spans those below it, so that at most two multiples of it can be part of the sum.
    """
    if not dims:
        return distance == 0
    (stride, size), rest = dims[0], dims[1:]
    span = _span(rest)
    least, most = -((span - distance) // stride), (distance + span) // stride
    multiples = range(max(least, 1 - size), min(most, size - 1) + 1)
    return any(_reaches(distance - n * stride, rest) for n in multiples)
