# SPDX-License-Identifier: Apache-2.0
"""Which code of a wheel a device runs."""

from __future__ import annotations

import pytest

from kernelkit.wheels import image_arch

SASS, PTX = ("80", "89", "90a"), ("80",)


@pytest.mark.parametrize(
    ("sass", "ptx", "device", "expected"),
    [
        (SASS, PTX, 90, 90),
        (SASS, PTX, 89, 89),
        (SASS, PTX, 86, 80),
        (SASS, PTX, 80, 80),
        # compute_80 PTX, on what there is no machine code for.
        (SASS, PTX, 100, 80),
        ((), PTX, 90, 80),
        (("89", "90a"), PTX, 86, 80),
        (("100a", "120a"), ("80", "90"), 103, 90),
        (SASS, (), 120, 0),
        (SASS, PTX, 75, 0),
    ],
)
def test_image_arch(
    sass: tuple[str, ...], ptx: tuple[str, ...], device: int, expected: int
) -> None:
    assert image_arch(sass, ptx, device) == expected
