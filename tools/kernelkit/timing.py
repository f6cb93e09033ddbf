# SPDX-License-Identifier: Apache-2.0
"""Time per node of a CUDA graph with a cold L2, and host time per call.

One call between two events measures the launch: 5 to 8 us that hide the differences between small
kernels. A graph of many calls divides them away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

MIN_NODES = 32
# Several times the L2 of any GPU: an operand set comes round only after it has been evicted.
COLD_BYTES = 400_000_000
# Small operands would need tens of thousands of sets; the flush before each replay serves them.
MAX_SETS = 512


def operand_sets(bytes_per_set: int, total: int = COLD_BYTES) -> int:
    """How many sets of operands to rotate through, so that together they exceed `total` bytes."""
    if bytes_per_set <= 0:
        raise ValueError(f"bytes_per_set: expected a positive number, got {bytes_per_set}")
    return min(max(total // bytes_per_set + 1, 2), MAX_SETS)


def rotation(calls: Sequence[Call], nodes: int) -> list[Call]:
    """`calls` in turn, whole rounds of them, at least `nodes` in all."""
    if not calls:
        raise ValueError("calls: expected at least one")
    return list(calls) * -(-nodes // len(calls))


def capture(calls: Sequence[Call], *, warmup: int = 3) -> torch.cuda.CUDAGraph:
    """A graph of `calls` in order, each run `warmup` times before on the capturing stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            for call in dict.fromkeys(calls):
                call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def node_times_us(
    calls: Sequence[Call], *, nodes: int = 4 * MIN_NODES, replays: int = 21
) -> list[float]:
    """Microseconds per call of each replay of one graph, sorted.

    Args:
        calls: one per operand set, see `operand_sets`; each enqueues the same work.
        nodes: lower bound on the calls in the graph.
        replays: measured replays, each after a flush of L2 that is outside the measurement.
    """
    if nodes < MIN_NODES:
        raise ValueError(f"nodes: expected at least {MIN_NODES}, got {nodes}")
    rounds = rotation(calls, nodes)
    graph = capture(rounds)
    return [time / len(rounds) for time in replay_times_us(graph, replays)]


def replay_times_us(graph: torch.cuda.CUDAGraph, replays: int = 21) -> list[float]:
    """Microseconds of each replay of a graph, sorted; L2 is flushed before each, unmeasured."""
    flush = torch.zeros(COLD_BYTES // 4, device="cuda")
    graph.replay()
    times = []
    for _ in range(replays):
        # Read, not written: dirty lines would be written back during the measurement. It also keeps
        # the GPU busy while the host launches the graph.
        flush.sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)


def replay_time_us(graph: torch.cuda.CUDAGraph, replays: int = 21) -> float:
    """Median of `replay_times_us`."""
    return statistics.median(replay_times_us(graph, replays))


def node_time_us(calls: Sequence[Call], *, nodes: int = 4 * MIN_NODES, replays: int = 21) -> float:
    """Median of `node_times_us`."""
    return statistics.median(node_times_us(calls, nodes=nodes, replays=replays))


def host_time_us(call: Call, *, calls: int = 200, batches: int = 21) -> float:
    """Microseconds that the host spends in one call: the median over batches of back-to-back calls.

    The GPU is waited for between batches, outside the measurement: a full launch queue would add
    the kernel's own time.
    """
    times = []
    for batch in range(batches + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - begin
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if batch:  # the first one warms caches and allocator
            times.append(elapsed / calls * 1e6)
    return statistics.median(times)
