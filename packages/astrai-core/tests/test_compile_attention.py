# SPDX-License-Identifier: Apache-2.0
"""Attention in a trace of torch.compile: torch's, and what is demanded is asked."""

from __future__ import annotations

import pytest
import torch

import astrai_core
from astrai_core.attn import TorchNativeBackend

pytestmark = pytest.mark.usefixtures("no_earlier_trace")


def test_attention_is_torchs_and_asks_what_is_demanded_while_it_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.randn(1, 3, 2, 8)
    compiled = torch.compile(astrai_core.attention, fullgraph=True, backend="eager")
    with (
        astrai_core.attn_backend("cuda"),
        pytest.raises(Exception, match=r"cuda is demanded by attn_backend\(\): torch.compile tr"),
    ):
        compiled(q, q, q)
    monkeypatch.setenv("ASTR_BACKEND", "none")
    with pytest.raises(Exception, match="ASTR_BACKEND: expected cuda, flash, torch_native, got"):
        compiled(q, q, q)
    monkeypatch.setenv("ASTR_BACKEND", "cuda")
    expected = compiled(q, q, q)
    # As it is documented: what is traced is not asked again.
    monkeypatch.setenv("ASTR_BACKEND", "none")
    with astrai_core.attn_backend("cuda"):
        assert torch.equal(compiled(q, q, q), expected)


def test_a_backend_derived_from_torchs_is_not_taken_for_it_in_a_trace() -> None:
    class Mine(TorchNativeBackend):
        pass

    q = torch.randn(1, 3, 2, 8)
    compiled = torch.compile(astrai_core.attention, fullgraph=True, backend="eager")
    with (
        astrai_core.attn_backend(Mine),
        pytest.raises(Exception, match=r"Mine is demanded by attn_backend\(\): torch.compile tr"),
    ):
        compiled(q, q, q)
    with astrai_core.attn_backend("torch_native"):
        assert torch.equal(compiled(q, q, q), astrai_core.attention(q, q, q))
