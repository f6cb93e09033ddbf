# SPDX-License-Identifier: Apache-2.0
"""Wrong: returns, as its name in the environment says, what is no logits of its own."""

import os

import torch
from decoder import build_model
from decoder import decode_step as compute

__all__ = ["build_model", "decode_step"]


def decode_step(handle, token_ids, pos):
    logits = compute(handle, token_ids, pos)
    embed = handle.weights["embed"]
    return {
        "output_type": lambda: (logits,),
        "output_shape": lambda: logits[:, :-1],
        "output_dtype": logits.double,
        "output_device": lambda: logits.to("meta"),
        "output_alias": lambda: embed.view(-1)[: logits.numel()].view_as(logits),
        "non_finite": lambda: logits.index_fill(1, token_ids[:1], torch.inf),
    }[os.environ["RETURNS"]]()
