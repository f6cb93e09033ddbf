# SPDX-License-Identifier: Apache-2.0
"""The grader on a GPU, at the smallest scale."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "name", ["right_fp32", "right_bf16", "graph", "kernel_runs_on", "kernel_never_ends"]
)
def test_right(graded, name):
    report = graded(name, device="cuda", runs=2)
    assert report.passed, report.text()
    assert len(report.errors) == 2 and max(report.errors) < report.tol / 2
    assert report.timing.steps == 2 * 4


@pytest.mark.parametrize(
    ("name", "check"),
    [("other_stream", "logits"), ("patches_clock", "clock"), ("ignores_table", "foreign_page")],
)
def test_wrong(graded, name, check):
    report = graded(name, device="cuda", runs=1)
    assert check in {finding.check for finding in report.findings}, report.text()
