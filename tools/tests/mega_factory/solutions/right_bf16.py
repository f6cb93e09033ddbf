# SPDX-License-Identifier: Apache-2.0
"""Right: bf16 logits in a buffer of its own that every step reuses, and no teardown."""

from decoder import Decoder


def build_model(weights, kv_cache, cfg, max_seq_len):
    handle = Decoder(weights, kv_cache, cfg, max_seq_len)
    handle.out = weights["embed"].new_empty(len(handle.rows), cfg["vocab"])
    return handle


def decode_step(handle, token_ids, pos):
    return handle.out.copy_(handle.step(token_ids, pos))
