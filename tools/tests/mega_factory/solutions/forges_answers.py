# SPDX-License-Identifier: Apache-2.0
"""Wrong: answers the grader itself, through the worker's socket."""

import os
from pathlib import Path

from decoder import build_model
from decoder import decode_step as compute

__all__ = ["build_model", "decode_step"]

ANSWER = b'{"us": 1.0, "type": "Tensor", "dtype": "float32", "shape": [2, 512], "device": "cpu"}'
FRAME = len(ANSWER).to_bytes(4, "big") + bytes(8) + ANSWER


def decode_step(handle, token_ids, pos):
    for link in Path("/proc/self/fd").iterdir():
        if link.is_socket():
            os.write(int(link.name), FRAME)
    return compute(handle, token_ids, pos)
