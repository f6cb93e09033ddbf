# SPDX-License-Identifier: Apache-2.0
"""Wrong: right logits, but changes a weight, the table and cfg, and drops another weight."""

from decoder import Decoder


def build_model(weights, kv_cache, cfg, max_seq_len):
    copies = weights | {"layers": [dict(layer) for layer in weights["layers"]]}
    copies["layers"][1]["gate"] = weights["layers"][1]["gate"].clone()
    return Decoder(copies, dict(kv_cache), dict(cfg), max_seq_len), weights, kv_cache, cfg


def decode_step(handle, token_ids, pos):
    decoder, weights, kv_cache, cfg = handle
    weights["layers"][1]["gate"][0, 0] = 7
    weights["layers"][0].pop("up", None)
    kv_cache["page_table"][1, 2] = 0
    cfg["layers"] = 1
    return decoder.step(token_ids, pos)
