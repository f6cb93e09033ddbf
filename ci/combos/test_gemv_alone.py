# SPDX-License-Identifier: Apache-2.0
"""A family without core: its ops are callable, and what they cannot do they refuse."""

import importlib.util

import pytest
import torch

import astrai_gemv


def test_only_the_family_is_installed(installed):
    assert installed == {"astrai-gemv"}
    assert importlib.util.find_spec("astrai_core") is None


def test_a_call_off_the_gpu_is_refused_with_the_reason():
    x, weight = torch.ones(2, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    with pytest.raises(ValueError, match="x: expected a CUDA tensor, got one on the CPU"):
        astrai_gemv.bf16_gemv(x, weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_call_on_the_gpu():
    x, weight = torch.ones(2, 8).bfloat16().cuda(), torch.ones(4, 8).bfloat16().cuda()
    assert astrai_gemv.bf16_gemv(x, weight).tolist() == [[8.0] * 4] * 2
