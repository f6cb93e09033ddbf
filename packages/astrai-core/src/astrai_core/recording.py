# SPDX-License-Identifier: Apache-2.0
"""Records which implementation served each call, and why every other one was passed over."""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from torch import Tensor
from torch.nn.parameter import is_lazy

_active: contextvars.ContextVar[tuple[Report, ...]] = contextvars.ContextVar(
    "astrai_explain", default=()
)


@dataclass(frozen=True)
class Row:
    """Calls that were alike.

    Attributes:
        op: name of the op in astrai_core.
        shapes: shapes of the tensors, as text.
        dtype: dtype of x or q.
        device: device of x or q.
        chosen: the implementation that ran: ``torch``, a family's name, or an attention backend's.
        passed_over: for each other implementation, why it was not chosen.
        calls: how many there were.
    """

    op: str
    shapes: str
    dtype: str
    device: str
    chosen: str
    passed_over: Mapping[str, str]
    calls: int


class Report:
    """The calls made while `explain` was active; ``print(report)`` shows a table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str, str, str, tuple[tuple[str, str], ...]], int] = {}

    def add(self, key: tuple[str, str, str, str, str, tuple[tuple[str, str], ...]]) -> None:
        """Counts one more call."""
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row for all calls of the same op, shapes, dtype, device and outcome, oldest first."""
        with self._lock:
            items = list(self._counts.items())
        return tuple(Row(*key[:5], dict(key[5]), count) for key, count in items)

    def to_json(self) -> str:
        """The rows as a JSON list."""
        return json.dumps([asdict(row) for row in self.rows], indent=2)

    def __str__(self) -> str:
        if not self.rows:
            return "no calls"
        head = ("op", "shapes", "dtype", "device", "calls", "ran on", "why not the others")
        lines = [head]
        for row in self.rows:
            why = "; ".join(f"{name}: {text}" for name, text in row.passed_over.items())
            lines.append(
                (row.op, row.shapes, row.dtype, row.device, str(row.calls), row.chosen, why)
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
        return "\n".join(
            "  ".join(
                [*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]
            ).rstrip()
            for line in lines
        )


@contextlib.contextmanager
def explain() -> Iterator[Report]:
    """Records the calls of this thread or task until the end of the block; nests.

    Calls inside compiled code are decided while torch.compile traces, and not recorded, but for
    those of swiglu that decide again when they run.

    Yields:
        The `Report`, which stays readable after the block.
    """
    report = Report()
    token = _active.set((*_active.get(), report))
    try:
        yield report
    finally:
        _active.reset(token)


def shape_of(operand: object) -> str:
    """The shape as text; nested tensors, lazy ones and what is no tensor have none."""
    if not isinstance(operand, Tensor) or is_lazy(operand):
        return type(operand).__name__
    return "nested" if operand.is_nested else str([*operand.shape])


def dtype_and_device_of(operand: object) -> tuple[str, str]:
    """Both as text; what is no tensor has none."""
    if not isinstance(operand, Tensor):
        return "-", "-"
    return str(operand.dtype).removeprefix("torch."), str(operand.device)


def active() -> tuple[Report, ...]:
    """The reports that record calls now."""
    return _active.get()


def record(
    reports: tuple[Report, ...],
    op: str,
    shapes: str,
    dtype: str,
    device: str,
    chosen: str,
    passed_over: Mapping[str, str],
) -> None:
    """Adds one call to each of the reports."""
    key = (op, shapes, dtype, device, chosen, tuple(passed_over.items()))
    for report in reports:
        report.add(key)
