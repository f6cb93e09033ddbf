# SPDX-License-Identifier: Apache-2.0
"""Manifest of the family: read by a policy package, imports neither torch nor native code."""

from __future__ import annotations

try:
    from ._build import CUDA, PTX, SASS
except ModuleNotFoundError:  # a wheel built with CSRC_KERNELS=false
    CUDA, SASS, PTX = None, (), ()

__all__ = ["CONTRACT", "CUDA", "NAME", "NATIVE", "OPS", "PACKAGE", "PTX", "Q_TILE_ROWS", "SASS"]

NAME = "attention"
CONTRACT = 1
PACKAGE = "astrai_attention"
NATIVE = "astrai_attention._attention"
OPS: dict[str, tuple[str, ...]] = {
    "attn_decode": ("bfloat16",),
    "attn_paged_decode": ("bfloat16",),
    "attn_paged_prefill": ("bfloat16",),
    "attn_prefill": ("bfloat16",),
    "rotary_emb": ("bfloat16",),
}
Q_TILE_ROWS = 64
"""Query rows of a tile of `attn_paged_prefill`'s maps."""
