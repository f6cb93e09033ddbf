# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
import torch

from mega_factory.grader import checks, worker
from mega_factory.grader.report import Finding, Report, SolutionError, Timing

SCALE = {"batch": 2, "prefill_lens": [3, 6], "max_seq": 7, "decode_steps": 1, "tol": 0.1}


def paged_cache():
    pools = {name: [torch.ones(8, 1, 4, 2)] for name in "kv"}
    return {**pools, "page_table": torch.tensor([[5, 2], [0, 7]]).int(), "page_size": 4}


def test_slots_of_a_paged_cache():
    mask = worker.slot_mask(paged_cache(), [0, 3], [3, 6])
    expected = torch.zeros(8, 4, dtype=torch.bool)
    expected[5, :3] = expected[0, 3] = expected[7, :2] = True
    assert torch.equal(mask, expected)


def test_slots_of_a_contiguous_cache():
    cache = [(torch.ones(2, 1, 7, 2), torch.ones(2, 1, 7, 2))]
    mask = worker.slot_mask(cache, [0, 1], [3, 7])
    assert mask.tolist() == [[True] * 3 + [False] * 4, [False] + [True] * 6]
    assert worker.pools_of(cache).keys() == {"kv_cache.0.0", "kv_cache.0.1"}


def test_poison_is_apart():
    cache = paged_cache()
    foreign = worker.poison_mask(cache, SCALE, "foreign_pages")
    assert foreign.any(dim=1).tolist() == foreign.all(dim=1).tolist()
    assert foreign.any(dim=1).nonzero().flatten().tolist() == [1, 3, 4, 6]
    unwritten = worker.poison_mask(cache, SCALE, "unwritten_slots")
    # Also past max_seq, to the end of the last page.
    assert unwritten.nonzero().tolist() == [[2, 0], [2, 1], [2, 2], [2, 3], [5, 3], [7, 2], [7, 3]]
    assert not (foreign & unwritten).any()


def test_an_error_is_that_of_the_worst_row():
    expected = torch.ones(2, 4)
    actual = expected.clone()
    actual[1] = 1.5
    assert checks.relative_error(actual, expected) == pytest.approx(0.5)
    actual[0, 0] = math.nan
    assert math.isnan(checks.relative_error(actual, expected))


def test_logits_of_a_later_step_are_named():
    expected = [torch.randn(1, 16) for _ in range(3)]
    observed = checks.Observed(logits=[expected[0], expected[2], expected[2]])
    error, (finding,) = checks.check_logits(observed, expected, [], None, 1e-3)
    assert error > 0.1
    assert (finding.check, finding.step) == ("stale_logits", 1)
    assert "1 of 3 steps are wrong; these are right for step 2" in finding.detail


@pytest.mark.parametrize(
    ("times", "walls", "found"),
    [
        ([900.0] * 8, [1000.0] * 8, 0),
        ([900.0] * 8, [1000.0] * 3 + [9000.0] * 5, 0),
        ([500.0] * 8, [1000.0] * 8, 1),
        # Of a long step a tenth may be hidden.
        ([9500.0] * 8, [10_300.0] * 8, 0),
        ([9500.0] * 8, [11_000.0] * 8, 1),
    ],
)
def test_clock(times, walls, found):
    observed = checks.Observed(times_us=times, walls_us=walls)
    assert len(checks.check_clock(observed, 100.0, "cuda")) == found


@pytest.mark.parametrize("us", [-1.0, math.nan, "0", None])
def test_what_is_no_time(us):
    with pytest.raises(SolutionError, match="protocol: expected microseconds"):
        checks.checked_time(us)


def report(**fields):
    return Report("task", "0123", "full", "gpu", 7, 0.06, **fields)


def test_report_of_a_fast_solution():
    timing = Timing.of([float(us) for us in range(101)])
    assert (timing.median_us, timing.p10_us, timing.p90_us, timing.steps) == (50, 10, 90, 101)
    good = report(floor_us=40, baselines={"eager": 500.0}, errors=[0.02], timing=timing)
    assert good.speed() == {"fraction_of_floor": 0.8, "speedup_over_eager": 10}
    assert good.text().splitlines()[1:] == [
        "worst relative error of each run: 0.02; allowed 0.06",
        "step: median 50.0 us, p10 10.0, p90 90.0 (101 steps)",
        "fraction_of_floor: 0.800",
        "speedup_over_eager: 10.000",
        "PASS",
    ]
    assert json.loads(good.json())["speed"] == good.speed()


def test_report_of_a_wrong_solution():
    finding = Finding("crash", "it ended\nPASS", run=1, step=2)
    bad = report(findings=[finding], errors=[math.inf])
    assert bad.text().splitlines()[1:3] == ["FAIL crash: run 1: step 2: it ended", "    PASS"]
    assert bad.text().splitlines()[-1] == "FAIL"
    fields = json.loads(bad.json())
    assert (fields["verdict"], fields["errors"], fields["timing"]) == ("fail", [None], None)
