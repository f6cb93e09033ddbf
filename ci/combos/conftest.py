# SPDX-License-Identifier: Apache-2.0
"""What every combination asks of an environment in which wheels were installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@dataclass(frozen=True)
class Diagnosis:
    """What ``python -m astrai_core doctor --json`` says."""

    status: int
    report: dict[str, Any]

    def family(self, name: str) -> dict[str, Any]:
        return next(family for family in self.report["families"] if family["name"] == name)

    @property
    def gemv(self) -> dict[str, Any]:
        return self.family("gemv")


@pytest.fixture
def doctor() -> Diagnosis:
    done = subprocess.run(
        [sys.executable, "-m", "astrai_core", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return Diagnosis(done.returncode, json.loads(done.stdout))


def operands(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 64), (48, 64), (48, 64)]
    return [torch.randn(*s, generator=generator).bfloat16().to(device) for s in shapes]


@pytest.fixture(params=DEVICES)
def calls(request: pytest.FixtureRequest) -> Any:
    """Runs both ops and returns the rows of explain() about them; the results must be torch's."""
    import astrai_core

    def run() -> list[Any]:
        x, up, gate = operands(request.param)
        with torch.no_grad(), astrai_core.explain() as report:
            projected = astrai_core.linear(x, up)
            gated = astrai_core.swiglu(x, up, gate)
        assert torch.equal(projected, F.linear(x, up))
        assert torch.equal(gated, F.linear(x, up) * F.silu(F.linear(x, gate)))
        assert {row.op for row in report.rows} == {"linear", "swiglu"}
        assert {row.chosen for row in report.rows} == {"torch"}
        return list(report.rows)

    return run


@pytest.fixture
def falls_back(calls: Any, doctor: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Checks that torch serves everything, for a reason that doctor gives and returns."""

    def run(kind: str) -> str:
        # The demand for the kernel must not change the outcome, nor the import of the package.
        for mode in ("0", "1", "auto"):
            monkeypatch.setenv("ASTRAI_GEMV", mode)
            monkeypatch.setenv("ASTRAI_SWIGLU", mode)
            calls()
        assert doctor.gemv["reason"]["kind"] == kind
        assert all(check["error"] is None for check in doctor.report["checks"])
        installed = doctor.gemv["version"] is not None
        assert doctor.status == int(installed and torch.cuda.is_available())
        return str(doctor.gemv["reason"]["text"])

    return run


@pytest.fixture
def python() -> Any:
    """Runs code in a process of its own and returns what it printed."""

    def run(code: str) -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    return run


@pytest.fixture
def installed() -> set[str]:
    """Our distributions in this environment."""
    names = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return {name for name in names if name.startswith("astrai-")}
