# SPDX-License-Identifier: Apache-2.0
"""The tiles of ragged queries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_core.attn import q_tile_schedule


def test_the_example_of_the_kernels_documentation() -> None:
    assert q_tile_schedule([70, 10, 130]) == (
        [0, 70, 80, 210],
        [0, 0, 1, 2, 2, 2],
        [0, 1, 0, 0, 1, 2],
    )


def test_edges() -> None:
    assert q_tile_schedule([]) == ([0], [], [])
    assert q_tile_schedule([0, 64, 0, 65]) == ([0, 0, 64, 64, 129], [1, 3, 3], [0, 0, 1])
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
        q_tile_schedule([2, -1])
