# SPDX-License-Identifier: Apache-2.0
import time

import pytest
import torch

from kernelkit import timing


def test_operand_sets_exceed_the_total():
    assert timing.operand_sets(8_388_608) == 48
    assert timing.operand_sets(1_000_000_000) == 2
    assert timing.operand_sets(1) == timing.MAX_SETS
    with pytest.raises(ValueError, match="bytes_per_set: expected a positive number, got 0"):
        timing.operand_sets(0)


def test_rotation_takes_whole_rounds():
    assert len(timing.rotation([print, repr, str], 32)) == 33
    with pytest.raises(ValueError, match="calls: expected at least one"):
        timing.rotation([], 32)


def test_a_graph_of_few_nodes_is_refused():
    with pytest.raises(ValueError, match="nodes: expected at least 32, got 1"):
        timing.node_time_us([print], nodes=1)


def test_host_time():
    assert 900 < timing.host_time_us(lambda: time.sleep(1e-3), calls=2, batches=3) < 20_000


@pytest.mark.gpu
def test_node_time_is_that_of_cold_memory():
    count = timing.operand_sets(2**26)
    sets = [torch.empty(2**24, device="cuda") for _ in range(count)]
    times = timing.node_times_us([lambda x=x: x.add_(1) for x in sets])
    assert times == sorted(times)
    # 128 MiB of traffic: no GPU moves it in 5 us, and one that takes 2 ms did not run in a graph.
    assert 5 < times[len(times) // 2] < 2_000


@pytest.mark.gpu
def test_a_captured_graph_replays():
    x = torch.zeros(4, device="cuda")
    graph = timing.capture([lambda: x.add_(1)] * 2, warmup=1)
    before = x[0].item()
    graph.replay()
    assert x[0].item() == before + 2
