# SPDX-License-Identifier: Apache-2.0
"""What this process may know of its GPUs. Nothing here runs at import."""

from __future__ import annotations

import ctypes
import functools

import torch


def count() -> int:
    """CUDA devices that torch sees."""
    return torch.cuda.device_count() if torch.version.cuda is not None else 0


@functools.cache
def capability(index: int) -> tuple[int, int] | None:
    """Compute capability of CUDA device `index`, None where there is none."""
    if not 0 <= index < count():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver supports, None without a driver.

    Asked of the driver itself: torch names the toolkit that it was built with only.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def why_none() -> str:
    """Why there is no CUDA device."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; "
            "install a CUDA build of torch to use a GPU"
        )
    return "torch sees no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES"
