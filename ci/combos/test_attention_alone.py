# SPDX-License-Identifier: Apache-2.0
"""The family of attention without core: its ops are callable, and refuse what they cannot do."""

import importlib.util

import pytest
import torch

import astrai_attention


def test_only_the_family_is_installed(installed):
    assert installed == {"astrai-attention"}
    assert importlib.util.find_spec("astrai_core") is None


def test_a_call_off_the_gpu_is_refused_with_the_reason():
    q, k = torch.ones(1, 1, 4, 64).bfloat16(), torch.ones(1, 9, 2, 64).bfloat16()
    with pytest.raises(ValueError, match="q: expected a CUDA tensor, got one on the CPU"):
        astrai_attention.attn_decode(q, k, k)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_call_on_the_gpu():
    q, k = torch.ones(1, 1, 4, 64).bfloat16().cuda(), torch.ones(1, 9, 2, 64).bfloat16().cuda()
    assert astrai_attention.attn_decode(q, k, k).tolist() == [[[[1.0] * 64] * 4]]
