# SPDX-License-Identifier: Apache-2.0
"""Core without a family: everything works on torch, and the extra that brings kernels is named."""


def test_only_core_is_installed(installed):
    assert installed == {"astrai-core"}


def test_torch_serves(falls_back):
    text = falls_back("not_installed")
    assert text == 'astrai-gemv is not installed; pip install "astrai-core[gemv]"'
