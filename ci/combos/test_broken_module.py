# SPDX-License-Identifier: Apache-2.0
"""A family whose native module is a text file: named with what mends it."""

import pytest
import torch

import astrai_gemv


def test_torch_serves(falls_back):
    text = falls_back("import_error")
    assert "invalid ELF header" in text or "file too short" in text
    assert text.endswith("pip install --force-reinstall --no-cache-dir --no-deps astrai-gemv")


def test_the_family_itself_says_so_at_the_call():
    x, weight = torch.ones(2, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    with pytest.raises(RuntimeError, match=r"does not load .*--force-reinstall --no-cache-dir"):
        astrai_gemv.bf16_gemv(x, weight)
