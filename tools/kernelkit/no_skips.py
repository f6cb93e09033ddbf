# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin under which a skip is a failure: ``pytest -p kernelkit.no_skips``.

A machine that was set up to run GPU tests and skips them has tested nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


def _fail(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a skip is a failure here: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skipped test into a failed one."""
    report = yield
    _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turns a module that skips itself into a failed one."""
    report = yield
    _fail(report)
    return report
