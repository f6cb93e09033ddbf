# SPDX-License-Identifier: Apache-2.0
"""Caches whose memory is not theirs alone, and those that only look like it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_model import Exact, Model, relative
from torch import Tensor

import astrai_core
from astrai_core.decode import build_model, decode_step
from astrai_core.decode._memory import is_distinct, share


def addresses(x: Tensor) -> list[int]:
    """Where each element of a view of `ROOM` is in it."""
    places = torch.arange(ROOM.numel()).as_strided(x.shape, x.stride(), x.storage_offset())
    return places.flatten().tolist()


ROOM = torch.zeros(400, dtype=torch.bfloat16)
VIEWS = [
    ROOM.as_strided(size, stride, offset)
    for size, stride in (
        ((3, 2, 4), (16, 8, 1)),
        ((3, 2, 4), (24, 4, 1)),
        ((2, 3, 4), (8, 16, 1)),
        ((3, 1, 4), (40, 7, 2)),
        ((5, 2, 2), (20, 10, 3)),
    )
    for offset in (0, 1, 4, 7, 8, 20, 43, 48, 100)
]


def test_views_share_memory_where_an_element_is_in_both() -> None:
    for a, b in itertools.product(VIEWS, repeat=2):
        common = not {*addresses(a)}.isdisjoint(addresses(b))
        same_strides = a.shape == b.shape and a.stride() == b.stride()
        found = share(a, b)
        assert found or not common
        if same_strides:
            assert found == common


@pytest.mark.parametrize(
    ("x", "distinct"),
    [
        (ROOM, True),
        (ROOM.view(4, 10, 10).permute(2, 0, 1), True),
        (ROOM[:1].expand(3), False),
        (ROOM[::4].view(10, 10), True),
        (ROOM.as_strided((2, 4), (3, 1)), False),
        (ROOM.as_strided((1, 4), (0, 1)), True),
    ],
)
def test_views_with_a_place_for_each_element(x: Tensor, distinct: bool) -> None:
    assert is_distinct(x) == distinct == (len({*addresses(x)}) == x.numel())


def twice(cache: dict[str, Any]) -> None:
    cache["v"] = cache["k"]


def one_layer(cache: dict[str, Any]) -> None:
    cache["v"][1] = cache["v"][0]


def expanded(cache: dict[str, Any]) -> None:
    cache["k"][1] = cache["k"][1][:1].expand_as(cache["k"][1])


def half(cache: dict[str, Any]) -> None:
    room = torch.zeros(2 * len(cache["k"][0]) - 1, *cache["k"][0].shape[1:])
    cache["k"][0], cache["v"][1] = room[: len(cache["k"][0])], room[len(cache["k"][0]) - 1 :]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (twice, r"kv_cache\['v'\]\[\d\]: expected memory of its own, got that of kv_cache\['k'\]"),
        (one_layer, r"kv_cache\['v'\]\[1\]: expected memory of its own, got that of .*'v'\]\[0\]"),
        (expanded, r"kv_cache\['k'\]\[1\]: expected memory of its own for each element, got str"),
        (half, r"kv_cache\['v'\]\[1\]: expected memory of its own, got that of .*'k'\]\[0\]"),
    ],
)
def test_pools_with_memory_in_common_are_refused(
    spoil: Callable[[dict[str, Any]], None], words: str
) -> None:
    model = Model([3, 3])
    cache = model.paged()
    spoil(cache)
    with astrai_core.use(decode="torch"), pytest.raises(ValueError, match=f"^{words}"):
        build_model(model.weights, cache, model.cfg, model.capacity)


def test_contiguous_pairs_with_memory_in_common_are_refused() -> None:
    model = Model([3])
    k, v = model.contiguous()[0]
    words = r"^kv_cache\[1\]\[1\]: expected memory of its own, got that of kv_cache\[0\]\[0\]$"
    with pytest.raises(ValueError, match=words):
        build_model(model.weights, [(k, v), (v.clone(), k)], model.cfg, 40)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_pools_between_each_other_are_not(at: int) -> None:
    model = Model([9, 9])
    exact, cache = Exact(model), model.paged()
    pools = torch.stack([*cache["k"], *cache["v"]], at).unbind(at)
    cache["k"], cache["v"] = [*pools[:2]], [*pools[2:]]
    handle = build_model(model.weights, cache, model.cfg, model.capacity)
    ids = model.tokens()
    assert relative(decode_step(handle, ids, 9), exact.step(ids, [9, 9])) < 1e-5


def test_a_table_that_changes_later_does_not_matter() -> None:
    model = Model([9])
    exact, cache = Exact(model), model.paged()
    handle = build_model(model.weights, cache, model.cfg, model.capacity)
    cache["page_table"].fill_(2**30)
    ids = model.tokens()
    assert relative(decode_step(handle, ids, 9), exact.step(ids, [9])) < 1e-5


def test_sequences_may_have_a_page_of_earlier_tokens_in_common() -> None:
    model = Model([9, 9])
    cache = model.paged()
    cache["page_table"][1, 0] = cache["page_table"][0, 0]
    for rows in (*model.k, *model.v):
        rows[1, :, :8] = rows[0, :, :8]
    exact = Exact(model)
    handle = build_model(model.weights, cache, model.cfg, model.capacity)
    ids = model.tokens()
    assert relative(decode_step(handle, ids, 9), exact.step(ids, [9, 9])) < 1e-5
