# SPDX-License-Identifier: Apache-2.0
"""Picks the fastest correct implementation of an op for each call, and says why.

Kernels come from separately installed family wheels; without any, everything runs on torch.
Attention has its own selection, of whole backends, and a paged KV cache.
Importing this package reads no manifest and touches no device: that happens at the first call.
"""

from __future__ import annotations

from typing import Any

from .attn import (
    ATTN_BACKEND,
    OutOfPagesError,
    PagedKVCache,
    apply_rotary_emb,
    attention,
    attn_backend,
    get_backend,
)
from .discovery import families
from .ops import linear, swiglu
from .policy import use
from .recording import explain

__all__ = [
    "ATTN_BACKEND",
    "OutOfPagesError",
    "PagedKVCache",
    "__version__",
    "apply_rotary_emb",
    "attention",
    "attn_backend",
    "decode",
    "explain",
    "families",
    "get_backend",
    "linear",
    "swiglu",
    "use",
]


def __getattr__(name: str) -> Any:
    # Searching the installed metadata takes longer than the rest of this import.
    if name == "__version__":
        from importlib import metadata

        return metadata.version("astrai-core")
    if name == "decode":
        import importlib

        return importlib.import_module(".decode", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
