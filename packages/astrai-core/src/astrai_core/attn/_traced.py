# SPDX-License-Identifier: Apache-2.0
"""Attention while torch.compile traces: torch's, which a graph can hold and differentiate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends import TorchNativeBackend
from .dispatch import other_than_torch

_torch = TorchNativeBackend()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _demanded() -> str:
    return other_than_torch()


def attention(call: tuple[Any, ...]) -> Tensor:
    """`astrai_core.attention` in a trace."""
    if demanded := _demanded():
        raise RuntimeError(
            f"attention: {demanded} is demanded by attn_backend(): torch.compile traces the call"
        )
    return _torch.forward(*call)
