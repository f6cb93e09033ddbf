# SPDX-License-Identifier: Apache-2.0
"""Small-M bf16 kernels for LLM decode: linear, SwiGLU, residual add with RMSNorm.

Every op runs its kernel or raises. The ops are resolved on first use: a policy package imports this
package to read its manifest, and must not load native code by that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gemv import bf16_gemv
    from .norm import add_rms_norm
    from .swiglu import bf16_swiglu

__all__ = ["add_rms_norm", "bf16_gemv", "bf16_swiglu"]

_MODULES = {"add_rms_norm": "norm", "bf16_gemv": "gemv", "bf16_swiglu": "swiglu"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
