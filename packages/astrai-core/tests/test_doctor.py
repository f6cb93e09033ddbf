# SPDX-License-Identifier: Apache-2.0
"""What makes the doctor find a machine unhealthy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from astrai_core import doctor
from conftest import Site


def test_doctor_reports_a_call_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise ArithmeticError("no luck")

    monkeypatch.setattr(doctor, "linear", fails)
    report = doctor.diagnose()
    (check,) = [c for c in report["checks"] if c["op"] == "linear"]
    assert check["error"] == "ArithmeticError: no luck" and check["chosen"] is None
    assert not doctor.healthy(report) and "no luck" in doctor._text(report)


def test_a_broken_family_is_unhealthy_with_a_gpu_only(
    site: Site, gpus: Callable[..., None]
) -> None:
    site.add(CONTRACT=99)
    gpus()
    report = doctor.diagnose()
    assert doctor.healthy(report)
    assert not doctor.healthy({**report, "gpus": [{"index": 0}]})
