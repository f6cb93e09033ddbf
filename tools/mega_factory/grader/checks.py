# SPDX-License-Identifier: Apache-2.0
"""What is compared, and how a difference is named. Everything runs in the grading process."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .inputs import owned_pages, pools_of, slot_mask, slots_of
from .report import Finding, SolutionError
from .worker import LOGITS_DTYPES

# Steps that hid time by less than this, or by less than this share of it, pass: so much the
# grader's own work and the scheduler vary. A CPU is busy with the steps themselves, and with much
# else where tests run: answers there were seen to come 5 ms late.
HIDDEN_US = {"cuda": 300.0, "cpu": 10_000.0}
HIDDEN_SHARE = 0.1


POISON = "half of what must not be read is NaN"

# Keys and values against the logits' tolerance. With 16 layers of width 512, those of a right
# solution err up to 1.2 times as much as its logits; ones that were never written, by 1 or more.
APPEND_TOL = 2


@dataclass
class Observed:
    """What a solution did in one run.

    Attributes:
        tokens: what each step was given.
        logits: what each step returned: (B, vocab), bf16 or fp32, on the CPU.
        times_us: each step's time by the solution's process.
        walls_us: each step's time by the grading process, from its request to the answer.
        overhead_us: what of that is the grader's own, as measured without a solution.
    """

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)
    walls_us: list[float] = field(default_factory=list)
    overhead_us: float = 0.0

    def seen_us(self) -> list[float]:
        """Each step's time from outside, less the grader's own work."""
        return [wall - self.overhead_us for wall in self.walls_us]

    def outside_us(self) -> list[float]:
        """What of each step's time was outside `decode_step`."""
        return [wall - us for wall, us in zip(self.walls_us, self.times_us, strict=True)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The worst ||actual - expected|| / ||expected|| over rows, in fp32; NaN if any is."""
    actual, expected = actual.float(), expected.float()
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def check_returned(about: dict[str, Any], shape: tuple[int, int], device: str) -> torch.dtype:
    """The dtype of a step's logits, from what the solution's process says about them.

    Raises:
        SolutionError: `decode_step` did not return logits of `shape` in memory of its own.
    """

    def expect(check: str, what: str, found: Any, *allowed: Any) -> None:
        if found not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise SolutionError(
                Finding(check, f"{what} of the logits: expected {wanted}, got {found}")
            )

    expect("output_type", "type", about["type"], "Tensor")
    expect("output_shape", "shape", about["shape"], list(shape))
    expect("output_dtype", "dtype", about["dtype"], *LOGITS_DTYPES)
    expect("output_device", "device", about["device"], device)
    if about["alias"] is not None:
        raise SolutionError(
            Finding("output_alias", f"the logits lie in the memory of {about['alias']}")
        )
    return LOGITS_DTYPES[about["dtype"]]


def check_logits(
    observed: Observed, expected: list[Tensor], earlier: list[Observed], tol: float
) -> tuple[float, list[Finding]]:
    """The worst relative error of a run, and a finding on its first wrong step, if there is one.

    Args:
        observed: what the solution returned.
        expected: the reference's logits for the same tokens.
        earlier: the runs before, whose logits must not come again.
        tol: the largest relative error that passes.
    """
    errors = [relative_error(*pair) for pair in zip(observed.logits, expected, strict=True)]
    wrong = [step for step, error in enumerate(errors) if not error <= tol]
    if not wrong:
        return max(errors), []
    worst = max(errors, key=lambda error: error if error == error else float("inf"))
    step = wrong[0]
    logits = observed.logits[step]
    count = f"{len(wrong)} of {len(errors)} steps are wrong"
    if not logits.isfinite().all():
        bad = int((~logits.isfinite()).sum())
        detail = f"{bad} of {logits.numel()} logits are not finite; {count}; {POISON}"
        return float("inf"), [Finding("non_finite", detail, step=step)]
    source = origin(logits, step, observed, expected, earlier, tol)
    detail = f"relative error {errors[step]:.3g}, allowed {tol:g}; {count}"
    if source is None:
        return worst, [Finding("logits", detail, step=step)]
    return worst, [Finding("stale_logits", f"{detail}; these are {source}", step=step)]


def origin(
    logits: Tensor, step: int, observed: Observed, expected: list[Tensor],
    earlier: list[Observed], tol: float,
) -> str | None:  # fmt: skip
    """Which other step has these logits, in words; None if none has."""
    for number, run in enumerate([*earlier, observed], 1):
        for other, candidate in enumerate(run.logits):
            if (run is not observed or other < step) and torch.equal(candidate, logits):
                return f"what it returned in run {number}, step {other}"
    for other, candidate in enumerate(expected):
        if other != step and relative_error(logits, candidate) <= tol:
            return f"right for step {other}"
    return None


def check_memory(
    read: Callable[[str, Tensor], Tensor],
    original: dict[str, Tensor],
    kv_cache: Any,
    scale: dict[str, Any],
    steps: int,
) -> list[Finding]:
    """Compares everything that the solution was given with what it must be after some steps.

    Args:
        read: the solution's tensor at a path, like the given one in shape, dtype and device.
        original: by path, weights and cache as they were given, or rewritten since.
        kv_cache: the reference's, after the same steps.
        scale: of the bundle's spec.json.
        steps: how many.

    Returns:
        One finding of each kind, on the first tensor that has it.
    """
    pools = pools_of(kv_cache)
    start = scale["prefill_lens"]
    appended = slot_mask(kv_cache, start, [n + steps for n in start])
    owned = owned_pages(kv_cache, scale)
    found: dict[str, list[Finding]] = {}
    for path, before in original.items():
        after = read(path, before)
        changed = after.view(torch.uint8) != before.view(torch.uint8)
        if path in pools:
            outside = changed.any(dim=-1).transpose(1, 2).any(dim=-1) & ~appended
            findings = [
                *foreign_writes(path, outside, owned),
                *missing_appends(path, after, pools[path], kv_cache, scale, steps),
            ]
        else:
            findings = list(read_only(path, changed))
        for finding in findings:
            found.setdefault(finding.check, []).append(finding)
    return [
        dataclasses.replace(first, detail=f"{first.detail}; {len(more)} more tensors")
        if more
        else first
        for first, *more in found.values()
    ]


def read_only(path: str, changed: Tensor) -> Iterator[Finding]:
    """A finding if any byte of a tensor besides the pools changed."""
    if changed.any():
        check = "weights" if path.startswith("weights.") else "page_table"
        yield Finding(check, f"{path}: {int(changed.sum())} bytes changed, it is read-only")


def foreign_writes(path: str, outside: Tensor, owned: Tensor) -> Iterator[Finding]:
    """Findings on slots that were written besides this run's: `outside` is (n_pages, page_size)."""
    for check, whose, pages in (
        ("foreign_page", "another sequence's page", ~owned),
        ("own_page", "a page of its own, besides this run's positions", owned),
    ):
        hits = (outside & pages[:, None]).nonzero().tolist()
        if hits:
            page, slot = hits[0]
            yield Finding(
                check, f"{path}: page {page}, slot {slot} written: {whose}; {len(hits)} such slots"
            )


def missing_appends(
    path: str, after: Tensor, expected: Tensor, kv_cache: Any, scale: dict[str, Any], steps: int
) -> Iterator[Finding]:
    """Findings on positions of the first `steps` whose K or V is not the reference's."""
    tol = APPEND_TOL * scale["tol"]
    wrong = []
    for b, first in enumerate(scale["prefill_lens"]):
        positions = torch.arange(first, first + steps, device=after.device)
        pages, slots = slots_of(kv_cache, b, positions)
        got, want = (x[pages, :, slots].flatten(1).float() for x in (after, expected))
        errors = (got - want).norm(dim=1) / want.norm(dim=1)
        wrong += [
            (b, first + step, error, page, slot)
            for step, (error, page, slot) in enumerate(
                zip(errors.tolist(), pages.tolist(), slots.tolist(), strict=True)
            )
            if not error <= tol
        ]
    if wrong:
        b, position, error, page, slot = wrong[0]
        yield Finding(
            "kv_append",
            f"{path}: sequence {b}, position {position} is not in page {page}, slot {slot}: "
            f"relative error {error:.3g}, allowed {tol:g}; {len(wrong)} such positions",
            step=position - scale["prefill_lens"][b],
        )


def check_clock(observed: Observed, hidden_us: float) -> list[Finding]:
    """A finding if most steps took longer, seen from outside, than the solution's process says.

    Args:
        observed: what the solution did.
        hidden_us: how much longer a step may take, if a tenth of it is less.
    """
    # The lower quartile: a busy machine delays the answers of some steps, hardly of most.
    outside = sorted(observed.outside_us())[len(observed.walls_us) // 4] - observed.overhead_us
    wall, time = statistics.median(observed.walls_us), statistics.median(observed.times_us)
    if outside <= max(hidden_us, HIDDEN_SHARE * wall):
        return []
    detail = f"a step says it takes {time:.0f} us, and takes {wall - observed.overhead_us:.0f} us"
    return [Finding("clock", detail)]


def checked_time(us: float) -> float:
    """The microseconds that the solution's process says a step took.

    Raises:
        SolutionError: it is no time.
    """
    if not 0 <= us < math.inf:
        raise SolutionError(Finding("protocol", f"expected microseconds, got {us!r}"))
    return us
