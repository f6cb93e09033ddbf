# SPDX-License-Identifier: Apache-2.0
"""Attention: the paged KV cache, the backends, and rotary embedding."""

from __future__ import annotations

from .backends import AttentionBackend, CudaBackend, FlashAttnBackend, TorchNativeBackend
from .cache import OutOfPagesError, PagedKVCache
from .dispatch import ATTN_BACKEND, attention, attn_backend, get_backend
from .rotary import apply_rotary_emb
from .schedule import q_tile_schedule
from .step import Step

__all__ = [
    "ATTN_BACKEND",
    "AttentionBackend",
    "CudaBackend",
    "FlashAttnBackend",
    "OutOfPagesError",
    "PagedKVCache",
    "Step",
    "TorchNativeBackend",
    "apply_rotary_emb",
    "attention",
    "attn_backend",
    "get_backend",
    "q_tile_schedule",
]
