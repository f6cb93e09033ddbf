# SPDX-License-Identifier: Apache-2.0
"""What explain() and the doctor say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import astrai_core
from astrai_core import checks, doctor
from astrai_core.__main__ import main
from conftest import Site

X, W = torch.ones(2, 8), torch.ones(4, 8)


def test_equal_calls_are_one_row() -> None:
    with astrai_core.explain() as report:
        for _ in range(3):
            astrai_core.linear(X, W)
        astrai_core.linear(X[0], W)
    rows = report.rows
    assert [row.calls for row in rows] == [3, 1]
    assert rows[0].shapes == "x [2, 8] weight [4, 8]"
    assert (rows[0].op, rows[0].dtype, rows[0].device) == ("linear", "float32", "cpu")
    assert rows[0].chosen == "torch"
    assert "float32" in rows[0].passed_over["gemv"]
    assert json.loads(report.to_json())[0]["calls"] == 3
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:2] == ["op", "shapes"]
    assert (
        len({line.index(word) for line, word in zip(lines[:2], ("ran on", "torch"), strict=True)})
        == 1
    )


def test_blocks_nest_and_end() -> None:
    with astrai_core.explain() as outer:
        with astrai_core.explain() as inner:
            astrai_core.linear(X, W)
        astrai_core.linear(X, W)
    astrai_core.linear(X, W)
    assert inner.rows[0].calls == 1
    assert outer.rows[0].calls == 2


def test_another_thread_is_not_recorded() -> None:
    with astrai_core.explain() as report:
        thread = threading.Thread(target=astrai_core.linear, args=(X, W))
        thread.start()
        thread.join()
    assert report.rows == ()
    assert str(report) == "no calls"


def test_doctor_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.fail("this test is about a machine without a GPU: run it with -m 'not gpu' there")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {family["name"] for family in report["families"]} >= {"gemv", "fp8"}
    chosen = {check["op"]: check["chosen"] for check in report["checks"]}
    assert chosen == dict.fromkeys(("linear", "swiglu", "decode"), "torch")
    assert all(check["error"] is None for check in report["checks"])
    assert report["machine"]["no_gpu_because"]
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert 'pip install "astrai-core[gemv]"' in text
    assert "ASTRAI_GEMV=auto" in text


def test_doctor_finds_a_family_that_cannot_run(
    site: Site, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add()
    gpus((7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    monkeypatch.setattr(doctor, "_places", lambda: [torch.device("cpu")])
    report = doctor.diagnose()
    (gemv,) = [f for f in report["families"] if f["name"] == "gemv"]
    assert gemv["reason_by_gpu"]["cuda:0"]["kind"] == "architecture"
    assert not doctor.healthy(report)


def test_doctor_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return 1.1 * astrai_core.linear(x, w)

    monkeypatch.setattr(checks, "linear", wrong)
    report = doctor.diagnose()
    (check,) = [c for c in report["checks"] if c["op"] == "linear"]
    assert "relative error 0.1" in check["error"]
    assert not doctor.healthy({**report, "gpus": [{"index": 0}]})


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err
