# SPDX-License-Identifier: Apache-2.0
"""Prefill's plans and query tiles are pure functions: tested for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_attention import Q_TILE_ROWS, _attention, _family, q_tile_schedule

KB = 1024
H200 = _attention.DeviceInfo(
    sm_count=132, device_arch=90, image_arch=90, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
# compute_80 PTX compiled by the driver of the same GPU.
H200_PTX80 = _attention.DeviceInfo(
    sm_count=132, device_arch=90, image_arch=80, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
L20 = _attention.DeviceInfo(
    sm_count=92, device_arch=89, image_arch=89, smem_per_sm=100 * KB, smem_per_block=99 * KB
)
DEVICES = {"h200": H200, "h200-ptx80": H200_PTX80, "l20": L20}
HEAD_DIMS = (32, 64, 128, 256)


def plan(device: Any = H200, **changes: Any) -> dict[str, Any]:
    problem = {
        "batch": 1, "q_len": 2048, "kv_len": 2048, "q_tiles": 0, "q_heads": 32, "kv_heads": 8,
        "head_dim": 128, "masked": False,
    }  # fmt: skip
    return _attention.plan_prefill(**{**problem, **changes}, device=device)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_in_shared_memory(head_dim: int, masked: bool, name: str) -> None:
    found = plan(DEVICES[name], head_dim=head_dim, masked=masked)
    rows, keys = found["block"]
    tiles = 2 * head_dim * (rows + 2 * found["stages"] * keys)
    assert tiles < found["smem_bytes"] <= tiles + 256
    ctas = 1 if head_dim == 256 and name != "h200" else 2
    assert ctas * (found["smem_bytes"] + KB) <= (228 if name == "h200" else 100) * KB
    assert rows == (64 if head_dim == 256 else 128)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "heads"),
    [(32, 8, 4), (16, 16, 1), (6, 2, 1), (12, 2, 2), (8, 1, 4), (10, 5, 2)],
)
def test_heads_of_a_kv_head_share_a_cta(q_heads: int, kv_heads: int, heads: int) -> None:
    found = plan(q_heads=q_heads, kv_heads=kv_heads)
    assert (found["heads"], found["rows"]) == (heads, 128 // heads)
    assert found["tiles"] == 2048 * heads // 128
    assert found["grid"] == found["tiles"] * q_heads // heads


def test_the_tiles_of_the_maps() -> None:
    assert plan()["q_tile_rows"] == Q_TILE_ROWS
    assert _family.Q_TILE_ROWS == Q_TILE_ROWS
    parts = {
        (128, 8): (32, 2, 1),
        (128, 16): (64, 1, 1),
        (128, 32): (128, 1, 2),
        (256, 8): (16, 4, 1),
        (256, 32): (64, 1, 1),
    }
    for (head_dim, kv_heads), expected in parts.items():
        found = plan(q_tiles=7, head_dim=head_dim, kv_heads=kv_heads)
        assert (found["rows"], found["blocks_per_tile"], found["tiles_per_block"]) == expected
        assert found["grid"] == 7 * found["blocks_per_tile"] * 32 // found["heads"]


def test_sections_are_what_l2_holds() -> None:
    # K and V of a KV head: 4 MiB at 8,192 tokens of 128.
    assert plan(q_len=8192, kv_len=8192)["section"] == 8
    assert plan(q_len=8192, kv_len=8192, batch=2)["section"] == 8
    assert plan(batch=4)["section"] == 32
    assert plan(q_len=1 << 20, kv_len=1 << 20)["section"] == 1
    assert plan(kv_len=0)["section"] == 8


def test_dependent_launch_follows_the_image_not_the_gpu() -> None:
    # compute_80 code has no griddepcontrol.wait: launched early, it would read too early.
    assert plan(H200)["programmatic"] is True
    assert plan(H200_PTX80)["programmatic"] is False
    assert plan(L20)["programmatic"] is False


@given(
    batch=st.integers(1, 64),
    q_len=st.integers(1, 1 << 20) | st.integers(1, 300),
    kv_len=st.integers(0, 1 << 20) | st.integers(0, 300),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 16),
    head_dim=st.sampled_from(HEAD_DIMS),
    masked=st.booleans(),
    name=st.sampled_from(sorted(DEVICES)),
)
def test_every_query_has_a_row(
    batch: int,
    q_len: int,
    kv_len: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    masked: bool,
    name: str,
) -> None:
    q_heads = kv_heads * group
    found = plan(
        DEVICES[name], batch=batch, q_len=q_len, kv_len=kv_len, q_heads=q_heads,
        kv_heads=kv_heads, head_dim=head_dim, masked=masked,
    )  # fmt: skip
    heads, rows, tiles = found["heads"], found["rows"], found["tiles"]
    assert group % heads == 0 and heads * rows == found["block"][0]
    assert (tiles - 1) * rows < q_len <= tiles * rows
    groups = batch * q_heads // heads
    assert found["grid"] == tiles * groups <= 2**31 - 1
    assert 1 <= found["section"] <= groups
    assert found["blocks_per_tile"] * rows == 64 * found["tiles_per_block"]


@given(tiles=st.integers(1, 40), groups=st.integers(1, 40), section=st.integers(1, 40))
def test_the_order_of_the_dense_grid_visits_all_work_once(
    tiles: int, groups: int, section: int
) -> None:
    """The arithmetic of DenseQSchedule: heaviest tiles first within a section of groups."""
    section = min(section, groups)
    work = []
    for block in range(tiles * groups):
        which, within = divmod(block, section * tiles)
        first = which * section
        tile, unit = divmod(within, min(section, groups - first))
        work.append((tiles - 1 - tile, first + unit))
    assert sorted(work) == [(t, g) for t in range(tiles) for g in range(groups)]
    for begin in range(0, groups, section):
        order = [t for t, g in work if begin <= g < begin + section]
        assert order == sorted(order, reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "head_dim: expected 32, 64, 128 or 256, got 96"),
        ({"q_heads": 0}, "q_heads: expected 1..2147483647, got 0"),
        ({"kv_heads": 5}, "kv_heads: expected a divisor of q_heads = 32, got 5"),
        ({"kv_heads": 0}, "kv_heads: expected 1..32, got 0"),
        ({"batch": 0}, "batch: expected 1..2147483647, got 0"),
        ({"q_len": 0}, "q_len: expected 1..1073741824, got 0"),
        ({"kv_len": -1}, "kv_len: expected 0..1073741824, got -1"),
        ({"q_tiles": -1}, "q_tiles: expected 0..2147483647, got -1"),
        ({"q_tiles": 2**31 - 1}, "CTAs: expected 1..2147483647, got 34359738352"),
        ({"batch": 2**31 - 1}, "CTAs: expected 1..1, got 512"),
    ],
)
def test_impossible_problems(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_the_schedule_of_the_worked_example() -> None:
    assert q_tile_schedule([70, 10, 130], 64) == (
        [0, 70, 80, 210],
        [0, 0, 1, 2, 2, 2],
        [0, 1, 0, 0, 1, 2],
    )
    assert q_tile_schedule([70, 10, 130]) == q_tile_schedule([70, 10, 130], 64)


def test_schedules_of_little() -> None:
    assert q_tile_schedule([]) == ([0], [], [])
    assert q_tile_schedule((0, 64, 0, 65)) == ([0, 0, 64, 64, 129], [1, 3, 3], [0, 0, 1])
    assert q_tile_schedule([3], tile_rows=1) == ([0, 3], [0, 0, 0], [0, 1, 2])


@given(q_lens=st.lists(st.integers(0, 300), max_size=8), tile_rows=st.integers(1, 130))
def test_schedules_cover_every_query_once(q_lens: list[int], tile_rows: int) -> None:
    indptr, to_batch, to_index = q_tile_schedule(q_lens, tile_rows)
    rows = []
    for batch, index in zip(to_batch, to_index, strict=True):
        begin = indptr[batch] + index * tile_rows
        assert begin < indptr[batch + 1]
        rows += range(begin, min(begin + tile_rows, indptr[batch + 1]))
    assert rows == list(range(sum(q_lens)))


@pytest.mark.parametrize(
    ("q_lens", "tile_rows", "error", "message"),
    [
        ([1], 0, ValueError, "tile_rows: expected at least 1, got 0"),
        ([1], 2.0, TypeError, "tile_rows: expected an int, got float"),
        ([2, -1], 64, ValueError, "q_lens: expected lengths of at least 0 .*, got -1 at 1"),
        ([2**31 - 1, 1], 1 << 40, ValueError, "q_lens: expected .* at most 2147483647 in all"),
        ([2**70], 64, ValueError, "q_lens: expected an int of 64 bits"),
        ([True], 64, TypeError, "q_lens: expected an int, got bool"),
        (["2"], 64, TypeError, "q_lens: expected an int, got str"),
    ],
)
def test_impossible_schedules(
    q_lens: Any, tile_rows: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        q_tile_schedule(q_lens, tile_rows)
