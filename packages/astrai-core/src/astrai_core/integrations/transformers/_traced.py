# SPDX-License-Identifier: Apache-2.0
"""Where a forward is recorded, to run later on other values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["is_recorded"]


def is_recorded(x: Tensor) -> bool:
    """Whether what is done with x is traced or captured: its values are none, or one example's."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or isinstance(x, FakeTensor)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )
