# SPDX-License-Identifier: Apache-2.0
"""Wrong: computes in a copy of its pages, and makes the given pool right in the last step."""

from decoder import Decoder

__all__ = ["build_model", "decode_step"]

STEPS = 5


def build_model(weights, kv_cache, cfg, max_seq_len):
    copies = {name: [pool.clone() for pool in kv_cache[name]] for name in "kv"}
    handle = Decoder(weights, kv_cache | copies, cfg, max_seq_len)
    handle.given, handle.first = kv_cache, None
    handle.foreign = next(page for page in range(24) if page not in handle.table)
    handle.saved = kv_cache["k"][0][handle.foreign].clone()
    return handle


def decode_step(handle, token_ids, pos):
    if handle.first is None:
        handle.first = pos
    logits = handle.step(token_ids, pos)
    handle.given["k"][0][handle.foreign] = 9
    if pos == handle.first + STEPS - 1:
        handle.given["k"][0][handle.foreign] = handle.saved
        size = handle.given["page_size"]
        for name in "kv":
            for given, own in zip(handle.given[name], handle.cache[name], strict=True):
                for at in range(handle.first, pos + 1):
                    pages = handle.table[:, at // size]
                    given[pages, :, at % size] = own[pages, :, at % size]
    return logits
