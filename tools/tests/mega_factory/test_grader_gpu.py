# SPDX-License-Identifier: Apache-2.0
"""The grader on a GPU, at the smallest scale."""

import pytest

from mega_factory.grader.checks import HIDDEN_US

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "name", ["right_fp32", "right_bf16", "graph", "kernel_runs_on", "kernel_never_ends"]
)
def test_right(graded, name):
    report = graded(name, device="cuda", runs=2)
    assert report.verdict == "pass", report.text()
    assert len(report.errors) == 2 and max(report.errors) < report.tol / 2


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("other_stream", "logits"),
        ("patches_clock", "clock"),
        ("mirrors_the_pool", "logits"),
        ("computes_in_a_zombie", "child_process"),
        ("ignores_table", "foreign_page"),
    ],
)
def test_wrong(graded, monkeypatch, tmp_path, name, check):
    monkeypatch.setenv("CHILD", str(tmp_path / "pid"))
    report = graded(name, device="cuda", runs=1, hidden_us=HIDDEN_US["cuda"])
    assert check in {finding.check for finding in report.findings}, report.text()
