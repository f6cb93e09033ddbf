# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode as a solution of a task of the factory, as that grades it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mega_factory import render, specs
from mega_factory.grader.grading import grade

SOLUTION = Path(__file__).parents[1] / "benchmarks" / "decode_solution.py"


def test_it_solves_the_task_of_eight_paged_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAI_DECODE", "torch")
    bundle = render.write(specs.load("megakernel-gqa-paged-decode-batch8"), tmp_path)
    # A busy machine makes no step too slow.
    report = grade(bundle, SOLUTION, scale="tiny", device="cpu", runs=2, hidden_us=math.inf)
    assert report.verdict == "pass", report.text()
    assert len(report.errors) == 2
