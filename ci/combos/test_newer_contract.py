# SPDX-License-Identifier: Apache-2.0
"""A family made for a later core: disabled, with the command that brings that core."""


def test_torch_serves(falls_back):
    text = falls_back("contract_mismatch")
    assert "speaks contract 99, astrai-core speaks 1" in text
    assert text.endswith("pip install -U astrai-core")
