# SPDX-License-Identifier: Apache-2.0
"""Two distributions that provide the same family: neither is trusted, both are named."""


def test_both_are_installed(installed):
    assert installed == {"astrai-core", "astrai-gemv", "astrai-gemv-nightly"}


def test_torch_serves(falls_back):
    text = falls_back("duplicate")
    assert "astrai-gemv and astrai-gemv-nightly both provide the family 'gemv'" in text
    assert "pip uninstall" in text
