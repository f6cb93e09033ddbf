# SPDX-License-Identifier: Apache-2.0
"""Families that were built without kernels, on purpose: named so, with what brings kernels."""

import importlib.metadata

import pytest
import torch

import astrai_gemv


def test_the_wheel_is_for_any_platform():
    assert "Tag: py3-none-any" in importlib.metadata.distribution("astrai-gemv").read_text("WHEEL")


def test_torch_serves(falls_back):
    text = falls_back("no_kernels")
    assert text.startswith("astrai-gemv was built without kernels (CSRC_KERNELS=false); ")


def test_the_family_itself_says_so_at_the_call():
    x, weight = torch.ones(2, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    with pytest.raises(RuntimeError, match=r"bf16_gemv: this wheel was built without kernels"):
        astrai_gemv.bf16_gemv(x, weight)
