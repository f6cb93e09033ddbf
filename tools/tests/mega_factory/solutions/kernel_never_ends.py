# SPDX-License-Identifier: Apache-2.0
"""Right: a kernel that build_model launches runs for ever, and there is no teardown."""

import torch
from decoder import Decoder
from decoder import decode_step as compute


def build_model(weights, kv_cache, cfg, max_seq_len):
    handle = Decoder(weights, kv_cache, cfg, max_seq_len)
    # Loading a kernel may wait for all that run: each has to be loaded before one runs on.
    copies = {name: [pool.clone() for pool in kv_cache[name]] for name in "kv"}
    warm = Decoder(weights, kv_cache | copies, cfg, max_seq_len)
    compute(warm, torch.zeros_like(handle.rows), 0)
    torch.cuda.current_stream().synchronize()
    handle.side = torch.cuda.Stream()
    with torch.cuda.stream(handle.side):
        torch.cuda._sleep(2**60)
    return handle


def decode_step(handle, token_ids, pos):
    if handle.side.query():
        raise RuntimeError("the kernel has ended")
    return compute(handle, token_ids, pos)
