# SPDX-License-Identifier: Apache-2.0
"""Wrong: computes the logits of a position once per process."""

from decoder import build_model
from decoder import decode_step as compute

__all__ = ["build_model", "decode_step"]

CACHE = {}


def decode_step(handle, token_ids, pos):
    if pos not in CACHE:
        CACHE[pos] = compute(handle, token_ids, pos)
    return CACHE[pos]
