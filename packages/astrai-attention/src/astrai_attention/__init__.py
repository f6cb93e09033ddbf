# SPDX-License-Identifier: Apache-2.0
"""bf16 kernels for attention in LLM inference: prefill, decode, rotary embedding.

Every op runs its kernel or raises. The ops are resolved on first use: a policy package imports this
package to read its manifest, and must not load native code by that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import attn_decode, attn_paged_decode, decode_workspace_size
    from .prefill import Q_TILE_ROWS, attn_paged_prefill, attn_prefill, q_tile_schedule
    from .rotary import rotary_emb

__all__ = [
    "Q_TILE_ROWS",
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "decode_workspace_size",
    "q_tile_schedule",
    "rotary_emb",
]

_MODULES = {
    "Q_TILE_ROWS": "prefill",
    "attn_decode": "decode",
    "attn_paged_decode": "decode",
    "attn_paged_prefill": "prefill",
    "attn_prefill": "prefill",
    "decode_workspace_size": "decode",
    "q_tile_schedule": "prefill",
    "rotary_emb": "rotary",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
