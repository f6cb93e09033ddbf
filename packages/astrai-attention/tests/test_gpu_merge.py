# SPDX-License-Identifier: Apache-2.0
"""Splits that are merged by the last of them, on a GPU: nobody else's launch is counted."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from decode_operands import check_values, paged
from operands import randn
from torch import Tensor

from astrai_attention import _attention, attn_paged_decode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

LENGTHS = [3000, 41]


def call_of(lengths: list[int] = LENGTHS) -> tuple[dict[str, Any], Tensor]:
    """A call that is split, and its result."""
    cache = paged(lengths, page_size=16, capacity=4096)
    arguments = {"q": randn(len(lengths), 1, 8, 64), **cache.arguments}
    return arguments, attn_paged_decode(**arguments)


def captured(
    arguments: dict[str, Any], calls: int = 4
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [attn_paged_decode(**arguments) for _ in range(calls)]
    return graph, results


@pytest.mark.sanitize
@pytest.mark.parametrize("length", [0, 1, 31, 33, 128, 129, 700, 4096])
def test_splits_without_tokens_take_no_part(length: int) -> None:
    """A sequence beside another of every split, and alone."""
    cache = paged([length, 4096], page_size=16, capacity=4096)
    arguments, q = cache.arguments, randn(2, 1, 8, 64)
    both = attn_paged_decode(q, **arguments, return_lse=True)
    check_values(both, q, cache.k, cache.v, cache.keep)
    of_first = {name: arguments[name][:1] for name in ("page_table", "seq_lens")}
    alone = attn_paged_decode(q[:1], **arguments | of_first, return_lse=True)
    for found, expected in zip(alone, both, strict=True):
        assert torch.equal(found, expected[:1])


def test_lengths_that_change_under_a_call_spoil_no_other() -> None:
    """CTAs of one launch may then find lengths that differ."""
    cache = paged([3000, 41], page_size=16, capacity=4096, reserved=True)
    arguments = {"q": randn(2, 1, 8, 64), **cache.arguments}
    expected = attn_paged_decode(**arguments)
    kept, lengths = arguments["seq_lens"].clone(), arguments["seq_lens"]
    graph, results = captured(arguments)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(side):
            for length in (4096, 1, 700, 0, 2000) * 20:
                lengths.fill_(length)
        for _ in range(20):
            attn_paged_decode(**arguments)
            graph.replay()
        torch.cuda.synchronize()
        lengths.copy_(kept)
        graph.replay()
        for found in (attn_paged_decode(**arguments), *results):
            assert torch.equal(found, expected)


def test_streams_count_for_themselves() -> None:
    calls = [call_of() for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[tuple[Tensor, Tensor]] = []
    for stream in streams:
        with torch.cuda.stream(stream):
            # The calls that queue up behind run at the same time.
            torch.cuda._sleep(40_000_000)
    for _ in range(100):
        for stream, (arguments, expected) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append((attn_paged_decode(**arguments), expected))
    torch.cuda.synchronize()
    assert all(torch.equal(found, expected) for found, expected in results)


def test_a_graph_beside_its_stream() -> None:
    """The graph runs on another stream than it was captured on, which goes on by itself."""
    calls = [call_of() for _ in range(3)]
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    graphs = []
    for arguments, expected in calls[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = [attn_paged_decode(**arguments) for _ in range(8)]
        graphs.append((graph, found, expected))
    arguments, expected = calls[2]
    for _ in range(20):
        torch.cuda.synchronize()
        for (graph, _, _), on in zip(graphs, (stream, other), strict=True):
            with torch.cuda.stream(on):
                graph.replay()
        results = []
        for on in (stream, torch.cuda.current_stream()):
            with torch.cuda.stream(on):
                results += [attn_paged_decode(**arguments) for _ in range(8)]
        torch.cuda.synchronize()
        assert all(torch.equal(result, expected) for result in results)
        for _, found, wanted in graphs:
            assert all(torch.equal(result, wanted) for result in found)


def test_branches_of_a_capture_count_for_themselves() -> None:
    calls = [call_of() for _ in range(3)]
    branches = [torch.cuda.Stream() for _ in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        results = []
        for branch, (arguments, _) in zip(branches, calls, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                results.append([attn_paged_decode(**arguments) for _ in range(4)])
        for branch in branches:
            main.wait_stream(branch)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        for found, (_, expected) in zip(results, calls, strict=True):
            assert all(torch.equal(result, expected) for result in found)


def test_a_graph_gives_its_counters_back() -> None:
    arguments, expected = call_of()
    before = held_now()
    graphs = [captured(arguments) for _ in range(3)]
    assert _attention.arrivals_held(0) == before + 12
    for graph, results in graphs:
        graph.replay()
        assert all(torch.equal(result, expected) for result in results)
    torch.cuda.synchronize()
    del graph, results, graphs
    assert held_now() == before


def test_more_captured_calls_than_there_are_counters() -> None:
    """A second kernel merges then, to the same bits."""
    arguments, expected = call_of()
    before = held_now()
    graph, results = captured(arguments, calls=4100)
    assert _attention.arrivals_held(0) == 4096
    graph.replay()
    assert all(torch.equal(result, expected) for result in results)
    del graph, results
    assert held_now() == before


def held_now() -> int:
    """The counters that are held, when the driver has given back those of graphs that are gone."""
    gc.collect()
    torch.cuda.synchronize()
    held, since = _attention.arrivals_held(0), time.monotonic()
    # The driver gives them back on a thread of its own.
    while time.monotonic() < since + 0.5:
        time.sleep(0.01)
        if _attention.arrivals_held(0) != held:
            held, since = _attention.arrivals_held(0), time.monotonic()
    return held
