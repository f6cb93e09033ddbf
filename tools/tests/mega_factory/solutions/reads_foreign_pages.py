# SPDX-License-Identifier: Apache-2.0
"""Wrong: writes through the table, and reads the pool as if its own pages came first."""

import torch
from decoder import Decoder, decode_step

__all__ = ["build_model", "decode_step"]


class Contiguous(Decoder):
    def gather(self, pool):
        pages = torch.arange(self.table.numel(), device=pool.device).view_as(self.table)
        return pool[pages].transpose(1, 2).flatten(2, 3).float()


def build_model(weights, kv_cache, cfg, max_seq_len):
    return Contiguous(weights, kv_cache, cfg, max_seq_len)
