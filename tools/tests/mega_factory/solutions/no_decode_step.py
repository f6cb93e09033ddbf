# SPDX-License-Identifier: Apache-2.0
"""Wrong: half of the contract."""

from decoder import build_model

__all__ = ["build_model"]
