# SPDX-License-Identifier: Apache-2.0
"""Wrong: takes page j of sequence b to be page b * pages + j of the pool."""

from decoder import Decoder, decode_step

__all__ = ["build_model", "decode_step"]


def build_model(weights, kv_cache, cfg, max_seq_len):
    handle = Decoder(weights, kv_cache, cfg, max_seq_len)
    handle.table = handle.table.new_tensor(range(handle.table.numel())).view_as(handle.table)
    return handle
