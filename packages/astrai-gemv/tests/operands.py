# SPDX-License-Identifier: Apache-2.0
"""Operands of GPU tests."""

from __future__ import annotations

import torch
from torch import Tensor

BF16 = torch.bfloat16


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)
