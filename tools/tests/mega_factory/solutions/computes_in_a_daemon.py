# SPDX-License-Identifier: Apache-2.0
"""Wrong: a process that this one gave up before the first step computes all of them."""

import ctypes
import os
import socket
from pathlib import Path

import torch
from decoder import Decoder

PR_SET_CHILD_SUBREAPER = 36


def serve(decoder, channel, out):
    while request := channel.recv(1024):
        *tokens, pos = map(int, request.split())
        out.copy_(decoder.step(torch.tensor(tokens), pos))
        channel.send(b".")


def build_model(weights, kv_cache, cfg, max_seq_len):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    for pool in (*kv_cache["k"], *kv_cache["v"]):
        pool.share_memory_()
    out = torch.zeros(len(kv_cache["page_table"]), cfg["vocab"]).share_memory_()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if daemon := os.fork():
            if name := os.environ.get("CHILD"):
                Path(name).write_text(str(daemon))
            os._exit(0)
        ours.close()
        serve(Decoder(weights, kv_cache, cfg, max_seq_len), theirs, out)
        os._exit(0)
    os.waitpid(pid, 0)
    return ours, out


def decode_step(handle, token_ids, pos):
    channel, out = handle
    channel.send(" ".join(map(str, [*token_ids.tolist(), pos])).encode())
    channel.recv(1)
    return out
