# SPDX-License-Identifier: Apache-2.0
"""Where a forward is recorded, to run later on other values."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_recorded"]


def is_recorded(x: Tensor) -> bool:
    """Whether what is done with x is traced or captured: its values are none, or one example's."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        # Fake tensors, and others that may have no values.
        or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )
