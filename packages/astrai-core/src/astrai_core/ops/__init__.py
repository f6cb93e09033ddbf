# SPDX-License-Identifier: Apache-2.0
"""The ops of astrai_core: each runs the implementation that the policy selects."""

from __future__ import annotations

from .linear import linear
from .swiglu import swiglu

__all__ = ["linear", "swiglu"]
