# SPDX-License-Identifier: Apache-2.0
"""Which of a wheel's code images a device can run. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable

Capability = tuple[int, int]

_ARCH = re.compile(r"(\d+)(\d)(a?)")


def parse(arch: str) -> tuple[Capability, bool]:
    """``"90a"`` -> ``((9, 0), True)``: the compute capability, and whether it is an `a` target.

    Raises:
        ValueError: the text names no architecture.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"arch: expected a name such as '80' or '90a', got {arch!r}")
    major, minor, exact = match.groups()
    return (int(major), int(minor)), bool(exact)


def name(capability: Capability) -> str:
    """``(9, 0)`` -> ``"90"``."""
    return f"{capability[0]}{capability[1]}"


def runs_sass(capability: Capability, arch: str) -> bool:
    """Machine code runs on its major version, from its minor on; an `a` target only there."""
    target, exact = parse(arch)
    if exact:
        return capability == target
    return capability[0] == target[0] and capability[1] >= target[1]


def runs_ptx(capability: Capability, arch: str) -> bool:
    """PTX is compiled for any device from its own architecture on; that of an `a` target is not."""
    target, exact = parse(arch)
    return capability == target if exact else capability >= target


def has_sass(capability: Capability, sass: Iterable[str]) -> bool:
    """Whether one of the machine-code images runs on the device."""
    return any(runs_sass(capability, arch) for arch in sass)


def has_ptx(capability: Capability, ptx: Iterable[str]) -> bool:
    """Whether the driver can compile one of the PTX images for the device."""
    return any(runs_ptx(capability, arch) for arch in ptx)
