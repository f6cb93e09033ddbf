# SPDX-License-Identifier: Apache-2.0
"""Right: a kernel that build_model launches runs until teardown stops it."""

import torch
import triton
import triton.language as tl
from decoder import Decoder
from decoder import decode_step as compute


@triton.jit
def spin(stop):
    while tl.atomic_add(stop, 0) == 0:
        pass


def build_model(weights, kv_cache, cfg, max_seq_len):
    handle = Decoder(weights, kv_cache, cfg, max_seq_len)
    handle.stop = torch.zeros(1, dtype=torch.int32, device="cuda")
    handle.one = torch.ones(1, dtype=torch.int32).pin_memory()
    # Loading a kernel may wait for all that run: each has to be loaded before one runs on.
    copies = {name: [pool.clone() for pool in kv_cache[name]] for name in "kv"}
    warm = Decoder(weights, kv_cache | copies, cfg, max_seq_len)
    compute(warm, torch.zeros_like(handle.rows), 0)
    torch.cuda.current_stream().synchronize()
    handle.side = torch.cuda.Stream()
    with torch.cuda.stream(handle.side):
        spin[(1,)](handle.stop)
    return handle


def decode_step(handle, token_ids, pos):
    if handle.side.query():
        raise RuntimeError("the kernel has ended")
    return compute(handle, token_ids, pos)


def teardown(handle):
    # A copy needs no kernel.
    handle.stop.copy_(handle.one, non_blocking=True)
    handle.side.synchronize()
