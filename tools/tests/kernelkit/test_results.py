# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import math
from pathlib import Path

import pytest

from kernelkit.results import Environment, load, markdown, merge, results_path

HERE = Environment("NVIDIA H200", "2.11.0", "13.0", "580.1", "2026-01-31T08:30+00:00")


def row(case="M=1,N=2,K=3", provider="astrai", us=2.0, **kwargs):
    return HERE.row("gemv", "bf16_gemv", case, provider, us, **kwargs)


def test_rates_come_from_bytes_and_flops():
    measured = row(us=2.0, bytes_moved=8_000_000, flops=4_000_000, error=0.123456)
    assert (measured.tb_s, measured.tflops, measured.error) == (4.0, 2.0, 0.1235)
    assert row().tb_s is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("op", "", "op: expected a non-empty string, got ''"),
        ("median_us", 0, "median_us: expected a positive number"),
        ("tb_s", math.nan, "tb_s: expected a finite number >= 0, got nan"),
        ("error", "1", "error: expected a finite number >= 0, got '1'"),
        ("date", "yesterday", "Invalid isoformat string"),
    ],
)
def test_a_row_is_checked(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row(), **{field: value})


def test_dates_without_a_time_are_dates():
    assert dataclasses.replace(row(), date="2026-01-31").date == "2026-01-31"


def test_merge_replaces_by_key_and_orders_cases_as_numbers(tmp_path):
    path = tmp_path / "h200" / "gemv.json"
    merge(path, [row("M=16,N=2"), row("M=2,N=2"), row("M=2,N=2", "cublas")])
    merge(path, [row("M=2,N=2", us=1.0)])
    rows = load(path)
    assert [(r.case, r.provider, r.median_us) for r in rows] == [
        ("M=2,N=2", "astrai", 1.0),
        ("M=2,N=2", "cublas", 2.0),
        ("M=16,N=2", "astrai", 2.0),
    ]
    before = path.read_text()
    merge(path, [])
    assert path.read_text() == before
    assert len(before.splitlines()) == len(rows) + 2


def test_load_names_the_row_that_is_wrong(tmp_path):
    path = tmp_path / "gemv.json"
    good = dataclasses.asdict(row())
    path.write_text(json.dumps([good, {**good, "speed": 1}]))
    with pytest.raises(ValueError, match="row 2: expected keys"):
        load(path)
    path.write_text(json.dumps([{**good, "median_us": -1}]))
    with pytest.raises(ValueError, match="row 1: median_us: expected a finite number"):
        load(path)


def test_markdown_leaves_what_was_not_measured_empty():
    rows = [row(), row(provider="cublas", us=7.04), row("M=2")]
    table = markdown(rows, "bf16_gemv", ["astrai", "cublas"])
    assert table.splitlines() == [
        "| case | astrai | cublas |",
        "|---|---:|---:|",
        "| M=1,N=2,K=3 | 2.0 | 7.0 |",
        "| M=2 | 2.0 |  |",
    ]


@pytest.mark.parametrize(
    ("gpu", "folder"), [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090")]
)
def test_the_path_names_the_gpu(gpu, folder):
    assert results_path(Path("docs"), gpu, "gemv") == Path("docs") / folder / "gemv.json"
