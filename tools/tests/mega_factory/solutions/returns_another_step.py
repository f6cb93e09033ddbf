# SPDX-License-Identifier: Apache-2.0
"""Wrong: from its third step on, returns the logits of the step before."""

from decoder import build_model
from decoder import decode_step as compute

__all__ = ["build_model", "decode_step"]


def decode_step(handle, token_ids, pos):
    handle.history = [*getattr(handle, "history", []), compute(handle, token_ids, pos)]
    return handle.history[-2 if len(handle.history) > 2 else -1]
