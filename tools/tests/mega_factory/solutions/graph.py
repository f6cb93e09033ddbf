# SPDX-License-Identifier: Apache-2.0
"""Right: a CUDA graph of the step, whose logits every step overwrites."""

import torch
from decoder import Decoder


def build_model(weights, kv_cache, cfg, max_seq_len):
    handle = Decoder(weights, kv_cache, cfg, max_seq_len)
    handle.tokens, handle.pos = torch.zeros_like(handle.rows), torch.zeros_like(handle.rows)
    handle.out = torch.zeros(len(handle.rows), cfg["vocab"], device="cuda")
    # A graph cannot load kernels; they run once, on a cache that nobody reads.
    copies = {name: [pool.clone() for pool in kv_cache[name]] for name in "kv"}
    Decoder(weights, kv_cache | copies, cfg, max_seq_len).step(handle.tokens, handle.pos)
    handle.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(handle.graph):
        handle.out.copy_(handle.step(handle.tokens, handle.pos))
    return handle


def decode_step(handle, token_ids, pos):
    handle.tokens.copy_(token_ids)
    handle.pos.fill_(pos)
    handle.graph.replay()
    return handle.out
