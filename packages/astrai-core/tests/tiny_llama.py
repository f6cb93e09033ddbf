# SPDX-License-Identifier: Apache-2.0
"""A Llama of two layers with grouped heads, and what its tests share."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from astrai_core._greedy import by_transformers, greedy

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
IDS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])


def llama(implementation="sdpa", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(**(SIZES | changes), attn_implementation=implementation)
    return LlamaForCausalLM(config).to(dtype).eval()


def logits(model, ids=IDS, **options):
    with torch.inference_mode():
        return model(input_ids=ids, **options).logits.clone()


def rows(report, op="attention"):
    return [row for row in report.rows if row.op == op]


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def tokens_of(forward, ids, count):
    with torch.inference_mode():
        return [token for token, _ in greedy(forward, ids, [], count)]


def ulps_below(logits, tokens):
    """How far the logits of tokens are below the largest of their rows at most, in ulp of bf16."""
    best = logits.max(-1).values
    ulp = torch.exp2(best.abs().log2().floor() - 7)
    return float(((best - logits.gather(-1, tokens[:, None])[:, 0]) / ulp).max())


def excess_ulps(network, prompt, tokens):
    """How far the network's logits of tokens are below its largest ones, in ulp of bf16.

    One step at a time, on the text that the tokens make: prefill rounds otherwise than decode.
    """
    forward, ids, worst = by_transformers(network), prompt, 0.0
    with torch.inference_mode():
        for token in tokens:
            logits = forward(ids).float()
            ids = torch.tensor([[token]], device=prompt.device)
            worst = max(worst, ulps_below(logits, ids[0]))
    return worst
