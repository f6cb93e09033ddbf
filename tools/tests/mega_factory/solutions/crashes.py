# SPDX-License-Identifier: Apache-2.0
"""Wrong: claims to have passed, then reads address 0 in its second step."""

import ctypes

from decoder import build_model
from decoder import decode_step as compute

__all__ = ["build_model", "decode_step"]


def decode_step(handle, token_ids, pos):
    if hasattr(handle, "called"):
        print("PASS", flush=True)
        ctypes.string_at(0)
    handle.called = True
    return compute(handle, token_ids, pos)
