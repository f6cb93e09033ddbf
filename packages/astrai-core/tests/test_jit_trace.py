# SPDX-License-Identifier: Apache-2.0
"""torch.jit.trace of attention and of models with it: sizes are tensors there."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import IDS, PADDED, assert_close, llama
from torch import nn
from transformers import AttentionInterface

from astrai_core import attention
from astrai_core.integrations.transformers import patch, register_attention

# torch deprecates its own torch.jit, which looks at what transformers deprecates of a module; sizes
# that are compared are those of the example.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 3, 5])
@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 1, 1, 1, 1], [1] * 5]).bool()])
def test_attention(is_causal, q_len, mask):
    def call(q, k):
        return attention(q, k, k, attn_mask=mask, is_causal=is_causal)

    q, k = random(2, q_len, 4, 8), random(2, 5, 2, 8)
    traced = torch.jit.trace(call, (q, k))
    # As many queries as keys have a mask in a trace only.
    assert_close(traced(q.flip(1), k.flip(1)), call(q.flip(1), k.flip(1)))


@pytest.mark.parametrize("lengths", [(5, 9), (3, 3), (2, 8)])
def test_a_causal_trace_serves_other_lengths(lengths):
    def call(q, k):
        return attention(q, k, k, is_causal=True)

    traced = torch.jit.trace(call, (random(2, 5, 4, 8), random(2, 5, 2, 8)))
    others = random(2, lengths[0], 4, 8), random(2, lengths[1], 2, 8)
    assert_close(traced(*others), call(*others))


def test_the_function_of_transformers():
    register_attention()
    module = nn.Module()
    module.num_key_value_groups = 2

    def call(q, k):
        return AttentionInterface()["astrai"](module, q, k, k, None)[0]

    q, k = random(2, 4, 5, 8), random(2, 2, 5, 8)
    traced = torch.jit.trace(call, (q, k))
    assert torch.equal(traced(q.flip(1), k.flip(1)), call(q.flip(1), k.flip(1)))


@pytest.mark.parametrize("mask", [None, torch.ones_like(IDS), PADDED])
def test_a_model(mask):
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = llama()

        def forward(self, ids, mask=None):
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    network = Logits()
    operands = (IDS,) if mask is None else (IDS, mask)
    with patch(network.model), torch.no_grad():
        traced = torch.jit.trace(network, operands)
        # What a mask of ones was traced for serves others too.
        others = (IDS.flip(1), *([] if mask is None else [PADDED]))
        assert_close(traced(*others), network(*others))
