# SPDX-License-Identifier: Apache-2.0
"""Wrong: changes weights and a foreign page, and would have the worker say neither that nor time.

It looks for the worker where a program finds its own code by name.
"""

import sys
import time

from decoder import Decoder

__all__ = ["build_model", "decode_step"]

FOUND = [
    (module, name)
    for key, module in list(sys.modules.items())
    if key in {"__main__", "reference", "inputs", "worker"} or key.startswith(("grader", "mega_"))
    for name in ("Session", "step_commands", "memory_commands", "make_inputs", "timed", "read")
    if hasattr(module, name)
]
for module, name in FOUND:
    setattr(module, name, None)
sys.modules["__main__"].perf_counter = time.perf_counter = lambda: 1.0


def build_model(weights, kv_cache, cfg, max_seq_len):
    if FOUND:
        raise RuntimeError(f"found {FOUND}")
    return Decoder(weights, kv_cache, cfg, max_seq_len)


def decode_step(handle, token_ids, pos):
    logits = handle.step(token_ids, pos)
    page = next(page for page in range(24) if page not in handle.table)
    handle.cache["k"][0][page].zero_()
    if pos == 25:
        handle.weights["layers"][1]["gate"].zero_()
    return logits
