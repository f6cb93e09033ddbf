# SPDX-License-Identifier: Apache-2.0
"""Wrong: its steps take long, and the clocks that they are timed by do not run."""

import sys
import time

import torch
from decoder import build_model
from decoder import decode_step as compute

__all__ = ["build_model", "decode_step"]

time.perf_counter = sys.modules["__main__"].perf_counter = lambda: 1.0
torch.cuda.Event.elapsed_time = lambda *_: 0.001


def decode_step(handle, token_ids, pos):
    time.sleep(0.05)
    return compute(handle, token_ids, pos)
