# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the families' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def seeded() -> Iterator[None]:
    """A test on the GPU: repeatable, without gradients, over when its kernels are."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.cuda.synchronize()
