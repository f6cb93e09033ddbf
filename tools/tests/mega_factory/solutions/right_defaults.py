# SPDX-License-Identifier: Apache-2.0
"""Right: sets defaults of torch when it is imported, and relies on them ever after."""

import torch
from decoder import Decoder

torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("cpu")


def build_model(weights, kv_cache, cfg, max_seq_len):
    torch.set_default_dtype(torch.float32)
    handle = Decoder(weights, kv_cache, cfg, max_seq_len)
    torch.set_default_dtype(torch.bfloat16)
    return handle


def decode_step(handle, token_ids, pos):
    logits = torch.empty(len(token_ids), handle.cfg["vocab"])
    if logits.dtype != torch.bfloat16:
        raise RuntimeError(f"the default has become {logits.dtype}")
    return logits.copy_(handle.step(token_ids, pos))
