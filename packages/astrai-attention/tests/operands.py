# SPDX-License-Identifier: Apache-2.0
"""Operands of GPU tests."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of any angle; those of a model are 1 and 0 in most dimensions."""
    angle = torch.rand(shape, device="cuda") * 6.4
    return angle.cos(), angle.sin()
