# SPDX-License-Identifier: Apache-2.0
"""Benchmark rows as JSON, and the tables that the docs show."""

from __future__ import annotations

import datetime
import json
import math
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

Key = tuple[str, str, str, str]

_TEXT = ("family", "op", "case", "provider", "gpu", "torch", "cuda", "driver", "date")


@dataclass(frozen=True)
class Row:
    """One measurement. A figure that makes no sense for an op is None.

    Rows of one GPU and one `date`, to the minute, are of one run, and can be compared.
    """

    family: str
    op: str
    case: str
    provider: str
    median_us: float
    tb_s: float | None
    tflops: float | None
    error: float | None
    gpu: str
    torch: str
    cuda: str
    driver: str
    date: str

    def __post_init__(self) -> None:
        for name in _TEXT:
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}: expected a non-empty string, got {value!r}")
        for name in ("median_us", "tb_s", "tflops", "error"):
            value = getattr(self, name)
            if value is None and name != "median_us":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
        if self.median_us == 0:
            raise ValueError("median_us: expected a positive number, got 0")
        datetime.datetime.fromisoformat(self.date)

    @property
    def key(self) -> Key:
        """What a newer measurement replaces."""
        return self.family, self.op, self.case, self.provider


@dataclass(frozen=True)
class Environment:
    """Where rows were measured."""

    gpu: str
    torch: str
    cuda: str
    driver: str
    date: str

    @classmethod
    def current(cls) -> Environment:
        """The current GPU, software and minute."""
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()[0]
        return cls(
            gpu=torch.cuda.get_device_name(),
            torch=torch.__version__,
            cuda=str(torch.version.cuda),
            driver=driver,
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        )

    def row(
        self,
        family: str,
        op: str,
        case: str,
        provider: str,
        median_us: float,
        *,
        bytes_moved: int | None = None,
        flops: int | None = None,
        error: float | None = None,
    ) -> Row:
        """A row of this environment, with the rates that `bytes_moved` and `flops` give."""
        return Row(
            family,
            op,
            case,
            provider,
            median_us=round(median_us, 3),
            tb_s=None if bytes_moved is None else round(bytes_moved / median_us / 1e6, 4),
            tflops=None if flops is None else round(flops / median_us / 1e6, 3),
            error=None if error is None else float(f"{error:.4g}"),
            **asdict(self),
        )


def results_path(folder: Path, gpu: str, family: str) -> Path:
    """``folder/h200/gemv.json`` for "NVIDIA H200" and gemv."""
    words = gpu.lower().replace("nvidia", " ").replace("geforce", " ").split()
    return folder / "-".join(words) / f"{family}.json"


def load(path: Path) -> list[Row]:
    """The rows of a file, each checked."""
    names = {field.name for field in fields(Row)}
    rows = []
    for number, entry in enumerate(json.loads(path.read_text()), 1):
        if not isinstance(entry, dict) or entry.keys() != names:
            found = sorted(entry) if isinstance(entry, dict) else entry
            raise ValueError(f"{path}: row {number}: expected keys {sorted(names)}, got {found}")
        try:
            rows.append(Row(**entry))
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: {error}") from error
    return rows


def merge(path: Path, rows: Iterable[Row]) -> None:
    """Writes `rows` into a file: each replaces the row of the same key, all others stay."""
    merged = {row.key: row for row in load(path)} if path.exists() else {}
    merged.update((row.key, row) for row in rows)
    # One row a line, in a fixed order: a diff shows the rows that moved.
    lines = [json.dumps(asdict(row)) for row in sorted(merged.values(), key=_order)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def markdown(rows: Iterable[Row], op: str, providers: Sequence[str]) -> str:
    """A table of median microseconds of one op: a line per case, a column per provider."""
    cells: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=_order):
        if row.op == op:
            cells.setdefault(row.case, {})[row.provider] = row
    lines = [f"| case | {' | '.join(providers)} |", "|---|" + "---:|" * len(providers)]
    for case, found in cells.items():
        times = (f"{found[p].median_us:.1f}" if p in found else "" for p in providers)
        lines.append(f"| {case} | {' | '.join(times)} |")
    return "\n".join(lines) + "\n"


def _order(row: Row) -> Any:
    """By case as numbers, not as text: M=2 before M=16."""
    case = [
        (0, int(w), "") if w.isdigit() else (1, 0, w) for w in re.split(r"(\d+)", row.case) if w
    ]
    return row.family, row.op, case, row.provider
