# SPDX-License-Identifier: Apache-2.0
"""What makes the doctor find a machine unhealthy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from astrai_core import doctor
from conftest import Site


@pytest.fixture
def gpu_of_cpu(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose calls run on the CPU."""
    gpus((9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(doctor, "_places", lambda: [torch.device("cpu")])


@pytest.mark.usefixtures("gpu_of_cpu")
def test_doctor_reports_a_call_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise ArithmeticError("no luck")

    monkeypatch.setattr(doctor, "linear", fails)
    report = doctor.diagnose()
    (check,) = [c for c in report["checks"] if c["op"] == "linear"]
    assert check["error"] == "ArithmeticError: no luck" and check["chosen"] is None
    assert not doctor.healthy(report) and "no luck" in doctor._text(report)


@pytest.mark.usefixtures("gpu_of_cpu")
def test_doctor_reports_operands_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert doctor.healthy(doctor.diagnose())
    monkeypatch.setattr(Tensor, "to", full)
    report = doctor.diagnose()
    assert {c["error"] for c in report["checks"]} == {"OutOfMemoryError: CUDA out of memory"}
    assert not doctor.healthy(report) and "out of memory" in doctor._text(report)


@pytest.mark.usefixtures("gpu_of_cpu")
def test_a_wrong_variable_is_unhealthy_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "yes")
    assert not doctor.healthy(doctor.diagnose())


def test_a_broken_family_is_unhealthy_with_a_gpu_only(
    site: Site, gpus: Callable[..., None]
) -> None:
    site.add(CONTRACT=99)
    gpus()
    report = doctor.diagnose()
    assert doctor.healthy(report)
    assert not doctor.healthy({**report, "gpus": [{"index": 0}]})
