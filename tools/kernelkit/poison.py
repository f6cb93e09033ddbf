# SPDX-License-Identifier: Apache-2.0
"""Hostile memory around operands: what must not be read is NaN, what must not be written is marked.

torch aligns a storage to 64 bytes on a CPU and 512 on a GPU, and the zone before an operand is a
multiple of both, so that `offset` alone decides an operand's alignment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GUARD_BYTES = 1024

# A NaN with a payload that no arithmetic produces. Formats of one byte have no payload: there a NaN
# that was written counts as missing.
_SENTINELS = {
    1: (torch.uint8, 0x7F),
    2: (torch.int16, 0x7FA5),
    4: (torch.int32, 0x7FA5A5A5),
    8: (torch.int64, 0x7FF5A5A5A5A5A5A5),
}


@dataclass(frozen=True)
class GuardedOutput:
    """An output between two guard zones, all of it filled with a sentinel."""

    tensor: Tensor
    _storage: Tensor

    def check(self) -> None:
        """Fails if an element was never written, or if anything was written around the output."""
        bits, sentinel = _bits(self._storage)
        start = self.tensor.storage_offset()
        stop = start + self.tensor.numel()
        for zone, first, last in (("before", 0, start), ("after", stop, bits.numel())):
            hits = (bits[first:last] != sentinel).nonzero()
            if hits.numel():
                distance = start - int(hits[-1]) if zone == "before" else int(hits[0]) + 1
                raise AssertionError(
                    f"{hits.numel()} elements {zone} the output were overwritten, the nearest "
                    f"{distance} from its edge"
                )
        unwritten = (bits[start:stop] == sentinel).nonzero()
        if unwritten.numel():
            raise AssertionError(
                f"{unwritten.numel()} of {self.tensor.numel()} elements were never written, "
                f"the first at flat index {int(unwritten[0])}"
            )


def guarded_output(
    shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    offset: int = 0,
) -> GuardedOutput:
    """A contiguous output, `offset` elements past an aligned address, to pass as ``out=``."""
    guard = GUARD_BYTES // dtype.itemsize
    size = math.prod(shape)
    storage = torch.empty(guard + offset + size + guard, dtype=dtype, device=device)
    bits, sentinel = _bits(storage)
    bits.fill_(sentinel)
    return GuardedOutput(storage[guard + offset :][:size].view(*shape), storage)


def misaligned(tensor: Tensor, offset: int, *, row_padding: int = 0) -> Tensor:
    """The values of `tensor`, `offset` elements past an aligned address, in the midst of poison.

    With `row_padding`, rows of the last dimension are that many elements apart, and the gaps are
    poisoned too.
    """
    guard = GUARD_BYTES // tensor.element_size()
    width = tensor.shape[-1]
    rows = tensor.numel() // width if width else 0
    pitch = width + row_padding
    storage = torch.empty(
        guard + offset + rows * pitch + guard, dtype=tensor.dtype, device=tensor.device
    )
    poison_(storage)
    block = storage[guard + offset :][: rows * pitch]
    view = block.view(*tensor.shape[:-1], pitch)[..., :width]
    return view.copy_(tensor.detach())


def poison_(tensor: Tensor) -> Tensor:
    """Fills with NaN, or with the largest value of an integer dtype: a huge index or length."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(math.nan)
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    dtype, sentinel = _SENTINELS[tensor.element_size()]
    return tensor.view(dtype), sentinel
