# SPDX-License-Identifier: Apache-2.0
"""How the query rows of a ragged batch are cut into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["q_tile_schedule"]


def q_tile_schedule(
    q_lens: Sequence[int], tile_rows: int
) -> tuple[list[int], list[int], list[int]]:
    """The tiles of queries that are packed one sequence after the other.

    No tile crosses from one sequence into the next, and none is empty.

    Args:
        q_lens: queries of each sequence.
        tile_rows: rows of a tile; the last tile of a sequence may have fewer.

    Returns:
        ``qo_indptr``: where each sequence's queries begin, and the total as the last entry.
        ``q_tile_to_batch``: the sequence of each tile.
        ``q_tile_to_index``: the position of each tile within its sequence, in tiles.

    Raises:
        ValueError: a negative length, or no rows in a tile.
    """
    if tile_rows < 1:
        raise ValueError(f"tile_rows: expected at least 1, got {tile_rows}")
    if any(length < 0 for length in q_lens):
        raise ValueError(f"q_lens: expected no negative length, got {[*q_lens]}")
    tiles = [-(-length // tile_rows) for length in q_lens]
    return (
        [0, *accumulate(q_lens)],
        [batch for batch, count in enumerate(tiles) for _ in range(count)],
        [index for count in tiles for index in range(count)],
    )
