# SPDX-License-Identifier: Apache-2.0
"""Wrong: right logits, but uses a slot of a page that no sequence of its own has as scratch."""

from decoder import Decoder, decode_step

__all__ = ["build_model", "decode_step"]


class Trespasser(Decoder):
    def append(self, pool, pages, slots, row):
        super().append(pool, pages, slots, row)
        pool[next(page for page in range(len(pool)) if page not in self.table), 0, 3] = 0


def build_model(weights, kv_cache, cfg, max_seq_len):
    return Trespasser(weights, kv_cache, cfg, max_seq_len)
