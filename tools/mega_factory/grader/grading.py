# SPDX-License-Identifier: Apache-2.0
"""Grades a solution: runs it in a process of its own and judges what that process answers.

The reference runs here, and only after the solution's steps: the solution's process never holds
what it is compared with, and the GPU is the solution's alone while steps are timed. Every step is
both checked and timed, so that none can be right only where it is looked at. The cache is read
after a step that cannot be foreseen, after the last, which in one of the runs cannot either, and
after teardown; before another step, all tokens that the cache came with are replaced by others.

What counts from outside is logits of tokens that nothing tells before their step, time by the clock
here, and the kernel's account of processes. The memory of the solution's process is read by that
process: one that searches it for the worker's own objects, see `worker`, can answer with what it
kept. Tokens of all steps follow from a seed in this process, which a process of the same user may
read where the system allows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import secrets
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import checks
from .inputs import data_of, load, make_inputs, plain_defaults, pools_of, tensors_in, written
from .plan import Plan, Seen, warm_up
from .process import PROC, Fields, Worker
from .report import Finding, Report, SolutionError, Timing

RUNS = 3
TIME_LIMIT_S = 600.0
REHEARSALS = 8
# How long to wait for a device that a solution without `teardown` may have left a kernel on.
IDLE_S = 5.0


# What the solution's process says about a step.
STEP_FIELDS: Fields = {
    "us": float, "type": str, "dtype": str, "shape": list, "device": str,
    "alias": (str, type(None)),
}  # fmt: skip


class BundleError(Exception):
    """The bundle, the machine or the arguments are at fault, not the solution."""


def read_spec(bundle: Path) -> dict[str, Any]:
    """The bundle's spec.json."""
    try:
        spec: dict[str, Any] = json.loads((bundle / "spec.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"bundle: expected a folder with a spec.json: {error}") from error
    return spec


def grade(
    bundle: Path, solution: Path, *, scale: str = "full", device: str = "cuda",
    runs: int = RUNS, time_limit: float = TIME_LIMIT_S, seed: int | None = None,
    hidden_us: float | None = None,
) -> Report:  # fmt: skip
    """Grades `solution`. Start no other process meanwhile: it would count as the solution's.

    Args:
        bundle: a folder with reference.py and spec.json.
        solution: a Python file with build_model, decode_step and, if it likes, teardown.
        scale: of spec.json.
        device: `cpu` or `cuda`.
        runs: how many, each with fresh weights, cache, page table and tokens.
        time_limit: seconds that the solution may take in one process, all calls together.
        seed: of an earlier report, to repeat it. The command line, which the solution's process can
            read, may have it: the report is no grade.
        hidden_us: how much longer a step may take than its process says, by default
            `checks.HIDDEN_US`.

    Raises:
        BundleError: grading is not possible.
    """
    spec = read_spec(bundle)
    if scale not in spec["scales"]:
        raise BundleError(f"scale: expected one of {', '.join(spec['scales'])}, got {scale}")
    if not solution.is_file():
        raise BundleError(f"solution: expected a Python file, got {solution}")
    if device == "cuda" and not torch.cuda.is_available():
        raise BundleError("device: expected a GPU for cuda, got a torch that sees none")
    if not PROC.is_dir():
        raise BundleError(f"machine: expected {PROC}, where the solution's processes are listed")
    if runs < 1:
        raise BundleError(f"runs: expected at least 1, got {runs}")
    if not 0 < time_limit < math.inf:
        raise BundleError(f"time limit: expected positive, finite seconds, got {time_limit:g}")
    report = Report(
        task=spec["name"], hash=spec["hash"], scale=scale, device=device_name(device),
        seed=secrets.randbits(48) if seed is None else seed, repeat=seed is not None, runs=runs,
        tol=spec["scales"][scale]["tol"], note=spec["note"],
        **(times_of(spec, device_name(device)) if scale == "full" else {}),
    )  # fmt: skip
    hidden_us = checks.HIDDEN_US[device] if hidden_us is None else hidden_us
    work = Grading(bundle, solution, spec, report, device, time_limit, hidden_us)
    with contextlib.closing(work) as grading:
        grading.grade()
    return report


def device_name(device: str) -> str:
    """What a report calls the device."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def times_of(spec: dict[str, Any], device: str) -> dict[str, Any]:
    """A report's floor and baselines, if the device of that name is the GPU that they are of."""
    if spec["bandwidth"]["gpu"].upper() not in device.split():
        return {}
    times = {name.removesuffix("_us"): us for name, us in (spec["baselines"] or {}).items()}
    return {
        "baselines": {name: us for name, us in times.items() if us is not None},
        "floor_us": spec["floor_us"],
        "measured_on": spec["measured_on"],
    }


class Grading:
    """One solution's grading, filling in a report."""

    def __init__(
        self, bundle: Path, solution: Path, spec: dict[str, Any], report: Report, device: str,
        time_limit: float, hidden_us: float,
    ) -> None:  # fmt: skip
        self.bundle, self.solution, self.report = bundle.resolve(), solution.resolve(), report
        self.scale: dict[str, Any] = spec["scales"][report.scale]
        self.per_sequence: bool = spec["per_sequence_pos"]
        self.device, self.time_limit, self.hidden_us = device, time_limit, hidden_us
        self.reference: ModuleType = load(self.bundle / "reference.py", "mega_reference")
        self.shapes = self._shapes()
        self.worker: Worker | None = None
        self.has_teardown = False
        self.step: int | None = None

    def _shapes(self) -> dict[str, Tensor]:
        """Tensors without memory like those that the solution is given, by path."""
        run = {"weights_seed": 0, "cache_seed": 0, "rewrite_seed": 0}
        weights, kv_cache, _ = make_inputs(self.reference, self.scale, run, self.device)
        given = [*tensors_in(weights, "weights"), *tensors_in(kv_cache, "kv_cache")]
        shapes = {path: x.to("meta") for path, x in given}
        del weights, kv_cache, given
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return shapes

    def close(self) -> None:
        """Ends the solution's process."""
        if self.worker is not None:
            self.worker.close()

    def grade(self) -> None:
        """Runs until the solution cannot be graded further; findings end nothing by themselves."""
        seeds = random.Random(self.report.seed)  # noqa: S311 - must be repeatable
        # A generator of its own: no seed that the solution's process gets leads to the tokens.
        tokens = random.Random(f"tokens {self.report.seed}")  # noqa: S311 - must be repeatable
        runs, steps = self.report.runs, self.scale["decode_steps"]
        early = tokens.randrange(runs) if runs > 1 else None
        inside: list[float] = []
        outside: list[float] = []
        observed: list[checks.Observed] = []
        for number in range(runs):
            names = ("weights_seed", "cache_seed", "rewrite_seed")
            run = {name: seeds.getrandbits(48) for name in names}
            plan = Plan.draw(steps, tokens, early=number == early)
            self.step = None
            try:
                worker = self.started()
                seen = self.drive(worker, run, plan, tokens)
                findings, now = self.judge(worker, run, plan, seen, observed)
                self.add(number, *findings)
                observed.append(seen.steps)
                inside += seen.steps.times_us[warm_up(steps) :]
                outside += seen.steps.seen_us()[warm_up(steps) :]
                if self.has_teardown:
                    self.teardown(worker)
                    known = {finding.check for finding in findings}
                    self.add(number, *(found for found in now() if found.check not in known))
                del now  # holds weights and caches
                self.finish(worker)
            except SolutionError as error:
                self.add(number, dataclasses.replace(error.finding, step=self.step))
                break
        self.report.timing = Timing.of(inside, outside) if inside else None

    def add(self, number: int, *findings: Finding) -> None:
        """Reports findings of a run, which is counted from 0."""
        self.report.findings += [dataclasses.replace(found, run=number + 1) for found in findings]

    def started(self) -> Worker:
        """The process, with the solution imported."""
        if self.worker is None:
            reference = self.bundle / "reference.py"
            self.worker = worker = Worker(self.time_limit, self.device, reference)
            worker.request({"do": "start"}, "its start")
            names = ("build_model", "decode_step", "teardown")
            command = {"do": "solution", "path": str(self.solution)}
            has = worker.request(command, "its import", fields=dict.fromkeys(names, bool))
            for name in names[:2]:
                if not has[name]:
                    raise SolutionError(Finding("import", f"expected a function {name}, got none"))
            self.has_teardown = has["teardown"]
        return self.worker

    def drive(self, worker: Worker, run: dict[str, Any], plan: Plan, tokens: random.Random) -> Seen:
        """Lets the solution build a model and decode, one unforeseeable token after the other."""
        worker.request(
            {"do": "inputs", "scale": self.scale, "run": run}, "the making of its inputs"
        )
        shape = (self.scale["batch"], self.scale["cfg"]["vocab"])
        rehearsal = checks.Observed()
        for _ in range(REHEARSALS):
            # With all that is between two steps: caches are then as cold as in one.
            self.request_step(worker, "rehearse", 0, tokens, rehearsal)
            unused = torch.empty(shape, dtype=torch.bfloat16)
            phase = "a step without the solution"
            worker.request({"do": "logits"}, phase, payload=data_of(unused))
            worker.check_children(phase)
        seen = Seen()
        seen.steps.overhead_us = statistics.median(rehearsal.outside_us())
        worker.request({"do": "build"}, "build_model")
        worker.settle("build_model")
        for step in range(plan.steps):
            if step and step == plan.rewrite:
                worker.request({"do": "rewrite"}, "the rewriting of the cache")
            self.step = step
            about = self.request_step(worker, "step", step, tokens, seen.steps)
            dtype = checks.check_returned(about, shape, self.device)
            logits = torch.empty(shape, dtype=dtype)
            worker.request({"do": "logits"}, "decode_step", payload=data_of(logits))
            seen.steps.logits.append(logits)
            worker.check_step()
            if step + 1 == plan.look:
                seen.memory = {p: self.read(worker, p, x) for p, x in self.shapes.items()}
        self.step = None
        return seen

    def request_step(
        self, worker: Worker, do: str, step: int, tokens: random.Random, seen: checks.Observed
    ) -> dict[str, Any]:
        """Times one step from outside; returns what the process says about it."""
        ids = [tokens.randrange(self.scale["cfg"]["vocab"]) for _ in self.scale["prefill_lens"]]
        command = {"do": do, "index": step, "tokens": ids, "pos": self.position(step)}
        phase = "decode_step" if do == "step" else "a step without the solution"
        start = time.perf_counter()
        about = worker.request(command, phase, fields=STEP_FIELDS)
        seen.walls_us.append((time.perf_counter() - start) * 1e6)
        seen.times_us.append(checks.checked_time(about["us"]))
        seen.tokens.append(ids)
        return about

    def position(self, step: int) -> int | list[int]:
        """What `pos` is in a step."""
        positions: list[int] = [length + step for length in self.scale["prefill_lens"]]
        return positions if self.per_sequence else positions[0]

    def judge(
        self, worker: Worker, run: dict[str, Any], plan: Plan, seen: Seen,
        earlier: list[checks.Observed],
    ) -> tuple[list[Finding], Callable[[], list[Finding]]]:  # fmt: skip
        """Compares what the solution did with what the reference does.

        Returns findings, and what finds them after teardown in all that the solution was given.
        """
        with plain_defaults():
            expected, found, memory = self.repeat(worker, run, plan, seen)
        error, findings = checks.check_logits(seen.steps, expected, earlier, self.scale["tol"])
        self.report.errors.append(error)
        clock = checks.check_clock(seen.steps, self.hidden_us)

        def now() -> list[Finding]:
            with plain_defaults():
                found = [*self.state(worker), *memory()]
            return [dataclasses.replace(f, detail=f"{f.detail}; after teardown") for f in found]

        return [*findings, *self.state(worker), *found, *clock], now

    def state(self, worker: Worker) -> list[Finding]:
        """Findings on cfg and the dicts that the solution was given, as they are now."""
        findings = []
        state = worker.request(
            {"do": "state"}, "the reading of its state", fields={"cfg": dict, "replaced": list}
        )
        if state["cfg"] != self.scale["cfg"]:
            detail = f"expected {self.scale['cfg']}, as it was given, got {state['cfg']}"
            findings.append(Finding("cfg", detail))
        if state["replaced"]:
            detail = f"other tensors, or none, at {', '.join(map(str, state['replaced']))}"
            findings.append(Finding("arguments", detail))
        return findings

    def repeat(
        self, worker: Worker, run: dict[str, Any], plan: Plan, seen: Seen
    ) -> tuple[list[Tensor], list[Finding], Callable[[], list[Finding]]]:
        """The reference's logits of each step, on the CPU, and findings on the memory.

        The last of what is returned finds them in the memory as it is when that is called.
        """
        weights, kv_cache, other = make_inputs(self.reference, self.scale, run, self.device)
        given = [*tensors_in(weights, "weights"), *tensors_in(kv_cache, "kv_cache")]
        original = {path: x.clone() if x.dim() == 4 else x for path, x in given}
        lens = self.scale["prefill_lens"]
        found: dict[str, Finding] = {}

        def compare(read: Callable[[str, Tensor], Tensor], steps: int) -> list[Finding]:
            return checks.check_memory(read, original, kv_cache, self.scale, steps)

        def now() -> list[Finding]:
            read = self.read
            return compare(lambda path, like: read(worker, path, like).to(like.device), plan.steps)

        def keep(findings: list[Finding], steps: int) -> None:
            for finding in findings:
                detail = f"{finding.detail}; after {steps} steps"
                found.setdefault(finding.check, dataclasses.replace(finding, detail=detail))

        expected = []
        handle = self.reference.build_model(
            weights, kv_cache, self.scale["cfg"], self.scale["max_seq"]
        )
        for step, tokens in enumerate(seen.steps.tokens):
            if step and step == plan.rewrite:
                originals = {path: original[path] for path in pools_of(kv_cache)}
                for pools in (None, originals):
                    views = zip(written(kv_cache, lens, pools), written(other, lens), strict=True)
                    for view, replacement in views:
                        view.copy_(replacement)
            expected.append(self.expect(handle, step, tokens))
            if step + 1 == plan.look:
                at_look = compare(lambda path, like: seen.memory[path].to(like.device), plan.look)
                keep(at_look, plan.look)
        keep(now(), plan.steps)
        return expected, list(found.values()), now

    def read(self, worker: Worker, path: str, like: Tensor) -> Tensor:
        """The solution's tensor at a path, on the CPU."""
        copy = torch.empty(like.shape, dtype=like.dtype)
        command = {"do": "read", "path": path}
        worker.request(command, f"the reading of {path}", payload=data_of(copy))
        return copy

    def expect(self, handle: Any, step: int, tokens: list[int]) -> Tensor:
        """The reference's logits of a step, on the CPU; its cache is appended to."""
        pos: Any = self.position(step)
        if isinstance(pos, list):
            pos = torch.tensor(pos, device=self.device)
        ids = torch.tensor(tokens, device=self.device)
        logits: Tensor = self.reference.decode_step(handle, ids, pos).cpu()
        if not logits.isfinite().all():
            raise BundleError(f"reference: expected finite logits, got others in step {step}")
        return logits

    def teardown(self, worker: Worker) -> None:
        """Calls the solution's, and waits for what it leaves on the device."""
        worker.request({"do": "teardown"}, "teardown")
        worker.request({"do": "wait"}, "the wait for the device after teardown")

    def finish(self, worker: Worker) -> None:
        """Ends a run, and the process if a solution without a teardown left a kernel running."""
        if self.has_teardown:
            worker.request({"do": "finish"}, "the end of a run")
        else:
            try:
                worker.request({"do": "finish"}, "the wait for the device", within=IDLE_S)
            except TimeoutError:
                worker.close()
                self.worker = None
        if self.device == "cuda":
            torch.cuda.empty_cache()
