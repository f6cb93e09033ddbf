# SPDX-License-Identifier: Apache-2.0
import json
import math
import random
import shutil

import pytest
import torch

from mega_factory.grader import checks, grading, inputs, plan
from mega_factory.grader.report import Finding, Report, SolutionError, Timing
from mega_factory.models import contiguous, paged

SCALE = {"batch": 2, "prefill_lens": [3, 6], "max_seq": 7, "decode_steps": 1, "tol": 0.1}


def paged_cache():
    pools = {name: [torch.ones(8, 1, 4, 2)] for name in "kv"}
    return {**pools, "page_table": torch.tensor([[5, 2], [0, 7]]).int(), "page_size": 4}


def test_slots_of_a_paged_cache():
    mask = inputs.slot_mask(paged_cache(), [0, 3], [3, 6])
    expected = torch.zeros(8, 4, dtype=torch.bool)
    expected[5, :3] = expected[0, 3] = expected[7, :2] = True
    assert torch.equal(mask, expected)


def test_slots_of_a_contiguous_cache():
    cache = [(torch.ones(2, 1, 7, 2), torch.ones(2, 1, 7, 2))]
    mask = inputs.slot_mask(cache, [0, 1], [3, 7])
    assert mask.tolist() == [[True] * 3 + [False] * 4, [False] + [True] * 6]
    assert inputs.pools_of(cache).keys() == {"kv_cache.0.0", "kv_cache.0.1"}


def test_half_of_what_must_not_be_read_is_poison():
    mask = inputs.poison_mask(paged_cache(), SCALE, 0)
    assert torch.equal(mask, inputs.poison_mask(paged_cache(), SCALE, 0))
    foreign = [1, 3, 4, 6]
    assert mask[foreign].any(dim=1).tolist() == mask[foreign].all(dim=1).tolist()
    assert mask[foreign].all(dim=1).sum() == 2
    # Also past max_seq, to the end of the last page.
    unwritten = [(2, 0), (2, 1), (2, 2), (2, 3), (5, 3), (7, 2), (7, 3)]
    assert sum(bool(mask[slot]) for slot in unwritten) == 4
    assert mask.sum() == 2 * 4 + 4
    masks = [inputs.poison_mask(paged_cache(), SCALE, seed) for seed in range(64)]
    assert torch.stack(masks).any(dim=0).sum() == len(foreign) * 4 + len(unwritten)


@pytest.mark.parametrize("model", [contiguous, paged])
def test_what_replaces_the_cache_goes_where_its_tokens_are(model):
    cfg = {"layers": 2, "n_kv": 1, "hd": 2, "page_size": 4, "theta": 1e4}
    first, other = (model.make_kv_cache(cfg, 2, [3, 6], 8, seed, "cpu") for seed in (1, 2))
    views = list(zip(inputs.written(first, [3, 6]), inputs.written(other, [3, 6]), strict=True))
    for view, replacement in views:
        view.copy_(replacement)
    pools, others = inputs.pools_of(first), inputs.pools_of(other)
    assert len(views) == len(pools) * (3 if model is paged else 2)
    assert all(view.is_contiguous() for pair in views for view in pair)
    for path, pool in pools.items():
        for b, length in enumerate([3, 6]):
            pages, slots = inputs.slots_of(first, b, torch.arange(8))
            theirs = inputs.slots_of(other, b, torch.arange(8))
            same = pool[pages, :, slots] == others[path][theirs[0], :, theirs[1]]
            assert same[:length].all() and not same[length:].all()


def test_defaults_come_back():
    with inputs.plain_defaults():
        torch.set_default_dtype(torch.bfloat16)
        with inputs.plain_defaults():
            assert torch.ones(1).dtype == torch.float32
        assert torch.ones(1).dtype == torch.bfloat16
    assert torch.ones(1).dtype == torch.float32
    with torch.device("meta"):
        with inputs.plain_defaults():
            assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1).device.type == "meta"


def test_a_plan_is_within_its_steps():
    source = random.Random(0)  # noqa: S311
    for early in (False, True):
        plans = [plan.Plan.draw(6, source, early=early) for _ in range(200)]
        assert {plan.steps for plan in plans} == ({3, 4, 5} if early else {6})
        assert all(min(plan.look, plan.rewrite) > 0 for plan in plans)
        assert all(max(plan.look, plan.rewrite) < plan.steps for plan in plans)


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
    error, (finding,) = checks.check_logits(observed, expected, [], 1e-3)
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
    observed = checks.Observed(times_us=times, walls_us=walls, overhead_us=100.0)
    assert len(checks.check_clock(observed, 300.0)) == found
    assert checks.check_clock(observed, math.inf) == []


@pytest.mark.parametrize("us", [-1.0, math.nan, math.inf])
def test_what_is_no_time(us):
    with pytest.raises(SolutionError, match="protocol: expected microseconds"):
        checks.checked_time(us)


def report(**fields):
    return Report(
        "task", "0123", "full", "gpu", 7, tol=0.06, **({"repeat": False, "runs": 1} | fields)
    )


def test_report_of_a_fast_solution():
    times = [float(us) for us in range(101)]
    timing = Timing.of(times, [us - 7 for us in times])
    assert (timing.median_us, timing.p10_us, timing.p90_us, timing.steps) == (50, 10, 90, 101)
    good = report(
        note="no GPU",
        floor_us=40,
        baselines={"eager": 500.0},
        measured_on="a GPU",
        errors=[0.02],
        timing=timing,
    )
    assert good.speed() == {
        "fraction_of_floor": 0.8, "fraction_of_eager": 10, "speedup_over_eager": 10
    }  # fmt: skip
    assert good.text().splitlines()[1:] == [
        "worst relative error of each run: 0.02; allowed 0.06",
        "no GPU",
        "step: median 50.0 us, p10 10.0, p90 90.0 (101 steps); 50.0 by its process, 43.0 outside",
        "eager: 500 us on a GPU",
        "fraction_of_floor: 0.800",
        "fraction_of_eager: 10.000",
        "speedup_over_eager: 10.000",
        "PASS",
    ]
    assert json.loads(good.json())["speed"] == good.speed()


def test_floor_and_baselines_are_of_one_gpu():
    spec = {
        "bandwidth": {"gpu": "h200", "tb_s": 4.8}, "floor_us": 40, "measured_on": "NVIDIA H200",
        "baselines": {"eager_us": 500.0, "graph_us": None},
    }  # fmt: skip
    times = {"baselines": {"eager": 500.0}, "floor_us": 40, "measured_on": "NVIDIA H200"}
    assert grading.times_of(spec, "NVIDIA H200") == times
    for other in ("NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA H100 80GB HBM3", "cpu"):
        assert grading.times_of(spec, other) == {}
    assert grading.times_of(spec | {"baselines": None}, "NVIDIA H200")["baselines"] == {}


def test_a_report_compares_with_the_times_of_its_gpu_at_full_scale(
    contiguous, tmp_path, monkeypatch
):
    bundle = shutil.copytree(contiguous, tmp_path / "bundle")
    spec = json.loads((bundle / "spec.json").read_text())
    spec |= {"floor_us": 2.0, "bandwidth": {"gpu": "h200", "tb_s": 4.8}}
    spec["scales"]["full"] = spec["scales"]["tiny"]
    (bundle / "spec.json").write_text(json.dumps(spec))

    def floor(scale):
        reference = bundle / "reference.py"
        return grading.grade(bundle, reference, scale=scale, device="cpu", runs=1).floor_us

    assert floor("full") is None
    monkeypatch.setattr(grading, "device_name", lambda _: "NVIDIA H200")
    assert (floor("full"), floor("tiny")) == (2.0, None)


def test_the_larger_time_counts():
    assert Timing.of([1.0, 5.0, 1.0], [4.0, 2.0, 4.0]) == Timing(4, 4, 4.8, 1, 4, 3)
    assert Timing.of([1.0], [2.0]).p90_us == 2


def test_report_of_a_wrong_solution():
    finding = Finding("crash", "it ended\nPASS\r\x1b[2J\ud800", run=1, step=2)
    bad = report(findings=[finding], errors=[math.inf])
    assert bad.text().splitlines()[1:3] == [
        "FAIL crash: run 1: step 2: it ended", "    PASS??[2J\\ud800"
    ]  # fmt: skip
    assert bad.text().splitlines()[-1] == "FAIL"
    fields = json.loads(bad.json())
    assert (fields["verdict"], fields["errors"], fields["timing"]) == ("fail", [None], None)


def test_only_a_solution_that_was_graded_in_every_run_passes():
    assert report(errors=[0.0], runs=1).verdict == "pass"
    assert report(errors=[0.0], runs=2).verdict == "fail"
    assert report(errors=[], runs=0).verdict == "fail"
    assert report(errors=[0.0], repeat=True).verdict == "repeat"
    assert report(errors=[0.0], repeat=True, findings=[Finding("x", "y")]).verdict == "fail"
