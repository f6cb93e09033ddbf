# SPDX-License-Identifier: Apache-2.0
"""Rows as JSON, and what threads and tasks record."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import torch

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
