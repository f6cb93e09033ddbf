# SPDX-License-Identifier: Apache-2.0
"""The tiles of ragged queries, of as many rows as the family's kernel takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import astrai_core
from astrai_core import PagedKVCache, attention, attn_backend
from astrai_core.attn import q_tile_schedule
from conftest import Site, install_attention


def test_the_example_of_the_kernels_documentation() -> None:
    assert q_tile_schedule([70, 10, 130], 64) == (
        [0, 70, 80, 210],
        [0, 0, 1, 2, 2, 2],
        [0, 1, 0, 0, 1, 2],
    )


def test_edges() -> None:
    assert q_tile_schedule([], 64) == ([0], [], [])
    assert q_tile_schedule([0, 64, 0, 65], 64) == ([0, 0, 64, 64, 129], [1, 3, 3], [0, 0, 1])
    assert q_tile_schedule([3], tile_rows=1) == ([0, 3], [0, 0, 0], [0, 1, 2])


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 17))
def test_the_tiles_cover_each_row_once(q_lens: list[int], tile_rows: int) -> None:
    indptr, to_batch, to_index = q_tile_schedule(q_lens, tile_rows)
    rows = []
    for batch, index in zip(to_batch, to_index, strict=True):
        first = indptr[batch] + index * tile_rows
        rows += range(first, min(first + tile_rows, indptr[batch + 1]))
        assert first < indptr[batch + 1], "an empty tile"
    assert rows == [*range(sum(q_lens))]


def test_lengths_and_tiles_that_are_none() -> None:
    with pytest.raises(ValueError, match="tile_rows: expected at least 1, got 0"):
        q_tile_schedule([1], 0)
    with pytest.raises(ValueError, match=r"q_lens: expected no negative length, got \[2, -1\]"):
        q_tile_schedule([2, -1], 64)


# --- the rows of a step's tiles -------------------------------------------------------------------

LENGTHS = [70, 10, 130]


def prefill() -> tuple[Any, torch.Tensor]:
    """A ragged step of its own cache, and the attention of its queries."""
    cache = PagedKVCache(1, 16, 16, 2, 32, device="cpu")
    step = cache.begin_step([cache.new_sequence() for _ in LENGTHS], LENGTHS)
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, sum(LENGTHS), heads, 32, generator=random).bfloat16() for heads in (4, 2, 2)
    )
    return step, attention(q, k, v, step, is_causal=True)


@pytest.mark.usefixtures("seen_as_gpu")
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_the_tiles_of_a_step_are_the_familys(rows: int, site: Site) -> None:
    native = install_attention(site, Q_TILE_ROWS=rows)
    native.tile_rows = rows
    with attn_backend("cuda"):
        step, found = prefill()
    assert native.calls == ["attn_paged_prefill"]
    tiles = step.q_tile_to_batch.tolist(), step.q_tile_to_index.tolist()
    assert tiles == q_tile_schedule(LENGTHS, rows)[1:]
    with attn_backend("torch_native"):
        torch.testing.assert_close(found, prefill()[1], atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("seen_as_gpu")
def test_without_the_familys_number_another_backend_serves(site: Site) -> None:
    native = install_attention(site, manifest_text="del Q_TILE_ROWS")
    with astrai_core.explain() as report:
        step, _ = prefill()
    assert native.calls == [] and step.q_tile_to_batch.numel() == step.q_tile_to_index.numel() == 0
    assert report.rows[-1].passed_over["cuda"] == (
        "astrai-attention 0.1.0 names no Q_TILE_ROWS in its manifest; "
        "pip install -U astrai-attention"
    )
    words = r"attn_backend\(\): astrai-attention 0.1.0 names no Q_TILE_ROWS"
    with attn_backend("cuda"), pytest.raises(RuntimeError, match=words):
        prefill()
