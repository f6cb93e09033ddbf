# SPDX-License-Identifier: Apache-2.0
"""Rows as JSON, and what threads and tasks record."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

import astrai_core
from astrai_core import recording


def test_json_has_every_field_of_a_row() -> None:
    with astrai_core.explain() as report:
        astrai_core.linear(torch.ones(2, 8), torch.ones(4, 8), torch.ones(4))
    (row,) = json.loads(report.to_json())
    assert row == {**vars(report.rows[0]), "passed_over": dict(report.rows[0].passed_over)}
    assert row["shapes"].endswith("bias") and row["dtype"] == "float32"


def test_counting_from_many_threads_loses_nothing() -> None:
    report = recording.Report()
    key = ("linear", "x", "bfloat16", "cpu", "torch", ())

    def add() -> None:
        for _ in range(2000):
            report.add(key)

    threads = [threading.Thread(target=add) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert report.rows[0].calls == 8000


def test_tasks_record_their_own_calls() -> None:
    async def task(m: int) -> list[str]:
        with astrai_core.explain() as report:
            await asyncio.sleep(0)
            astrai_core.linear(torch.ones(m, 8), torch.ones(4, 8))
            await asyncio.sleep(0)
        return [row.shapes for row in report.rows]

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(task(1), task(2)))

    assert asyncio.run(both()) == [[f"x [{m}, 8] weight [4, 8]"] for m in (1, 2)]


class Duck:
    """No tensor, but torch's functions take it."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> str:
        return "quack"


def outcome(call: Any, *operands: Any) -> tuple[str, str]:
    try:
        return "returned", call(*operands)
    except Exception as error:  # noqa: BLE001 (whatever torch raises)
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    "operand", [Duck(), None, numpy.ones((2, 8)), [[1.0]], torch.nn.UninitializedParameter()]
)
@pytest.mark.parametrize("place", [0, 1])
def test_recording_changes_no_outcome(operand: Any, place: int) -> None:
    operands: list[Any] = [torch.ones(2, 8), torch.ones(4, 8)]
    operands[place] = operand
    with astrai_core.explain() as report:
        found = outcome(astrai_core.linear, *operands)
    assert found == outcome(F.linear, *operands)
    (row,) = report.rows
    assert type(operand).__name__ in row.shapes
