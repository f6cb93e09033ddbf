# SPDX-License-Identifier: Apache-2.0
"""What grading found, as text and as JSON."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One reason to fail.

    Attributes:
        check: a stable name, such as `logits` or `foreign_page`.
        detail: what was expected and what came.
        run: which run, from 1; None before the first.
        step: which decode step of the run, from 0; None where it is not about a step.
    """

    check: str
    detail: str
    run: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        place = "" if self.run is None else f"run {self.run}: "
        if self.step is not None:
            place += f"step {self.step}: "
        return f"{self.check}: {place}{self.detail}"


def printable(text: str) -> str:
    """ASCII without control characters, lines after the first indented.

    What a solution says may hold what no terminal can show, or what would move its cursor.
    """
    lines = text.encode("ascii", "backslashreplace").decode().split("\n")
    return "\n    ".join(re.sub(r"[\x00-\x1f\x7f]", "?", line) for line in lines)


class SolutionError(Exception):
    """The solution cannot be graded further, for the reason of `finding`."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass(frozen=True)
class Timing:
    """Time of a decode step, in microseconds, over all steps after each run's warm-up.

    Attributes:
        median_us: of each step's time, the larger of the two below.
        p10_us: its lowest decile.
        p90_us: its highest decile.
        inside_us: median of what the solution's process says.
        outside_us: median of what passes in the grading process, less the grader's own work.
        steps: how many.
    """

    median_us: float
    p10_us: float
    p90_us: float
    inside_us: float
    outside_us: float
    steps: int

    @classmethod
    def of(cls, inside: list[float], outside: list[float]) -> Timing:
        """Summarises at least one step's times."""
        times = [max(pair) for pair in zip(inside, outside, strict=True)]
        median = statistics.median(times)
        deciles = statistics.quantiles(times, n=10, method="inclusive") if times[1:] else [median]
        return cls(
            median, deciles[0], deciles[-1], statistics.median(inside), statistics.median(outside),
            len(times),
        )  # fmt: skip


@dataclass
class Report:
    """A graded solution.

    Attributes:
        task: name of the bundle's task.
        hash: hash of its spec.
        scale: of spec.json, such as `tiny`.
        device: what it ran on.
        seed: repeats the grading with the same weights, cache and tokens.
        repeat: whether it is one: its tokens could be known in advance, so it is no grade.
        runs: how many were asked for.
        tol: the largest relative error of the logits that passes.
        note: what the tolerance lacks, if it does.
        floor_us: least time of a step that the task's traffic allows, if known here.
        baselines: times in us to compare with, by name, those known here.
        measured_on: where the baselines were measured.
        findings: every reason to fail; empty if the solution passes.
        errors: the worst relative error of each run's logits.
        timing: None if no step was timed.
    """

    task: str
    hash: str
    scale: str
    device: str
    seed: int
    repeat: bool
    runs: int
    tol: float
    note: str | None = None
    floor_us: float | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    measured_on: str | None = None
    findings: list[Finding] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    timing: Timing | None = None

    @property
    def verdict(self) -> str:
        """`pass`, `fail` or, of a repeat in which nothing was found, `repeat`."""
        if self.findings or len(self.errors) < self.runs or self.runs < 1:
            return "fail"
        return "repeat" if self.repeat else "pass"

    def speed(self) -> dict[str, float]:
        """Fractions of the floor and of each baseline: those times over the median.

        That of a baseline is how many times faster than it the solution is, and has both names.
        """
        if self.timing is None:
            return {}
        median = self.timing.median_us
        floor = {} if self.floor_us is None else {"floor": self.floor_us}
        times = floor | self.baselines
        fractions = {f"fraction_of_{name}": us / median for name, us in times.items()}
        faster = {f"speedup_over_{name}": us / median for name, us in self.baselines.items()}
        return fractions | faster

    def json(self) -> str:
        """Everything, with `verdict` and `speed`; an error that is not finite is null."""
        errors = [error if error < float("inf") else None for error in self.errors]
        fields: dict[str, Any] = {"verdict": self.verdict, **asdict(self)}
        return json.dumps(fields | {"errors": errors, "speed": self.speed()}, indent=2)

    def text(self) -> str:
        """The verdict, and every finding on a line of its own."""
        lines = [
            f"{self.task} ({self.hash}), {self.scale}, {self.device}, --seed {self.seed}",
            # Indented, what the solution printed cannot be taken for a line of the report.
            *(f"FAIL {printable(str(finding))}" for finding in self.findings),
        ]
        if self.errors:
            errors = ", ".join(f"{error:.3g}" for error in self.errors)
            lines.append(f"worst relative error of each run: {errors}; allowed {self.tol:g}")
        if self.note is not None:
            lines.append(self.note)
        if self.timing is not None:
            t = self.timing
            lines.append(
                f"step: median {t.median_us:.1f} us, p10 {t.p10_us:.1f}, p90 {t.p90_us:.1f} "
                f"({t.steps} steps); {t.inside_us:.1f} by its process, {t.outside_us:.1f} outside"
            )
        for name, us in self.baselines.items():
            lines.append(f"{name}: {us:g} us on {self.measured_on}")
        lines += [f"{name}: {value:.3f}" for name, value in self.speed().items()]
        last = {"pass": "PASS", "fail": "FAIL", "repeat": "REPEAT: nothing found, but no grade"}
        lines.append(last[self.verdict])
        return "\n".join(lines)
