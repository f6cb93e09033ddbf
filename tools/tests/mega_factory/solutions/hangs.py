# SPDX-License-Identifier: Apache-2.0
"""Wrong: its third step does not return, and a process of its own would outlive it."""

import os
import subprocess
import time
from pathlib import Path

from decoder import build_model
from decoder import decode_step as compute

__all__ = ["build_model", "decode_step"]


def decode_step(handle, token_ids, pos):
    handle.steps = getattr(handle, "steps", 0) + 1
    if handle.steps == 3:
        child = subprocess.Popen(["sleep", "601"], start_new_session=True)
        Path(os.environ["CHILD"]).write_text(str(child.pid))
        time.sleep(600)
    return compute(handle, token_ids, pos)
