# SPDX-License-Identifier: Apache-2.0
"""Decoding models of classes that inherit from transformers' Llama."""

from __future__ import annotations

import pytest
from tiny_llama import llama
from torch import nn
from transformers import LlamaForCausalLM

from astrai_core.decode import from_transformers
from astrai_core.integrations.transformers import patch


class Own(LlamaForCausalLM):
    """As of a user's own code: methods besides, and the forward of transformers."""

    def count(self):
        return sum(weight.numel() for weight in self.parameters())


class Scaled(LlamaForCausalLM):
    def forward(self, *args, **options):
        return super().forward(*args, **options)


class Called(LlamaForCausalLM):
    def __call__(self, *args, **options):
        return super().__call__(*args, **options)


class OfScaled(Scaled):
    pass


def test_a_subclass_with_the_same_forward_is_read_as_its_base():
    network = llama()
    expected = from_transformers(network)
    network.__class__ = Own
    found = from_transformers(network)
    assert found.cfg == expected.cfg
    assert found.weights["lm_head"].data_ptr() == expected.weights["lm_head"].data_ptr()
    with patch(network):
        assert from_transformers(network).cfg == expected.cfg
    network.lm_head = nn.Sequential(network.lm_head)
    with pytest.raises(ValueError, match="lm_head: Sequential is not part of a plain Llama"):
        from_transformers(network)
    network = llama()
    network.__class__ = Own
    network.forward = lambda x: x
    with pytest.raises(ValueError, match="itself: its forward was replaced on the instance"):
        from_transformers(network)


@pytest.mark.parametrize("kind", [Scaled, Called, OfScaled])
def test_a_subclass_with_another_forward_is_refused(kind):
    network = llama()
    network.__class__ = kind
    words = f"expected transformers' LlamaForCausalLM, got {kind.__name__}"
    with pytest.raises(ValueError, match=words):
        from_transformers(network)
