# SPDX-License-Identifier: Apache-2.0
"""Right: fp32 logits, and a teardown."""

from decoder import build_model, decode_step

__all__ = ["build_model", "decode_step", "teardown"]


def teardown(handle):
    del handle.table
