# SPDX-License-Identifier: Apache-2.0
"""Wrong: every step is computed by a child that starts and ends within it."""

import contextlib
import os
import signal

import torch
from decoder import Decoder


def build_model(weights, kv_cache, cfg, max_seq_len):
    if os.environ.get("CHILD") == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for pool in (*kv_cache["k"], *kv_cache["v"]):
        pool.share_memory_()
    decoder = Decoder(weights, kv_cache, cfg, max_seq_len)
    return decoder, torch.zeros(len(decoder.rows), cfg["vocab"]).share_memory_()


def decode_step(handle, token_ids, pos):
    decoder, out = handle
    pid = os.fork()
    if pid == 0:
        out.copy_(decoder.step(token_ids, pos))
        os._exit(0)
    if os.environ.get("CHILD") == "left":
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    else:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return out
