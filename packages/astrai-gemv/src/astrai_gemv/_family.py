# SPDX-License-Identifier: Apache-2.0
"""Manifest of the family: read by a policy package, imports neither torch nor native code."""

from __future__ import annotations

try:
    from ._build import CUDA, PTX, SASS
except ModuleNotFoundError:  # a wheel built with CSRC_KERNELS=false
    CUDA, SASS, PTX = None, (), ()

__all__ = ["CONTRACT", "CUDA", "NAME", "NATIVE", "OPS", "PACKAGE", "PTX", "SASS"]

NAME = "gemv"
CONTRACT = 1
PACKAGE = "astrai_gemv"
NATIVE = "astrai_gemv._gemv"
OPS: dict[str, tuple[str, ...]] = {
    "bf16_gemv": ("bfloat16",),
    "bf16_swiglu": ("bfloat16",),
    "add_rms_norm": ("bfloat16",),
}
