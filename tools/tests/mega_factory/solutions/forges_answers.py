# SPDX-License-Identifier: Apache-2.0
"""Wrong: answers in the worker's place, through its socket: what ANSWER holds, or as it would."""

import json
import os
from pathlib import Path

from decoder import build_model
from decoder import decode_step as compute

__all__ = ["build_model", "decode_step"]

RIGHT = {
    "us": 1.0, "type": "Tensor", "dtype": "float32", "shape": [2, 512], "device": "cpu",
    "alias": None,
}  # fmt: skip


def decode_step(handle, token_ids, pos):
    answer = json.dumps(RIGHT | json.loads(os.environ.get("ANSWER", "{}"))).encode()
    for link in Path("/proc/self/fd").iterdir():
        if link.is_socket():
            os.write(int(link.name), len(answer).to_bytes(4, "big") + bytes(8) + answer)
    return compute(handle, token_ids, pos)
