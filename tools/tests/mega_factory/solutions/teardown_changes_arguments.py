# SPDX-License-Identifier: Apache-2.0
"""Wrong: right in every step, but teardown changes a weight, the table, a foreign page and cfg."""

from decoder import Decoder, decode_step

__all__ = ["build_model", "decode_step", "teardown"]


def build_model(weights, kv_cache, cfg, max_seq_len):
    handle = Decoder(weights, kv_cache, dict(cfg), max_seq_len)
    handle.given = cfg
    return handle


def teardown(handle):
    page = next(page for page in range(24) if page not in handle.table)
    handle.cache["k"][0][page].zero_()
    handle.weights["layers"][1]["gate"].zero_()
    handle.cache["page_table"].zero_()
    handle.given["layers"] = 0
