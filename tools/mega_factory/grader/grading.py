# SPDX-License-Identifier: Apache-2.0
"""Grades a solution: runs it in a process of its own and judges what it did from outside.

The reference runs here, and only after the solution's steps: the solution's process never holds
what it is compared with, and the GPU is the solution's alone while steps are timed. Every step is
both checked and timed, so that none can be right only where it is looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import secrets
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import checks
from .process import PROC, Worker
from .report import Finding, Report, SolutionError, Timing
from .worker import data_of, load, make_inputs, tensors_in

REHEARSALS = 8
# How long to wait for a device that a solution without `teardown` may have left a kernel on.
IDLE_S = 5.0


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
    bundle: Path, solution: Path, *, scale: str = "full", device: str = "cuda", runs: int = 3,
    time_limit: float = 600, seed: int | None = None,
) -> Report:  # fmt: skip
    """Grades `solution`.

    Args:
        bundle: a folder with reference.py and spec.json.
        solution: a Python file with build_model, decode_step and, if it likes, teardown.
        scale: of spec.json.
        device: `cpu` or `cuda`.
        runs: how many, each with fresh weights, cache, page table and tokens. In the second, pages
            of other sequences are NaN, in the third the slots that no token was written to; then
            the same again. A contiguous cache has no pages of others.
        time_limit: seconds that the solution may take in one process, all calls together.
        seed: of an earlier report, to repeat it.

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
    seed = secrets.randbits(48) if seed is None else seed
    report = Report(
        task=spec["name"], hash=spec["hash"], scale=scale, device=device_name(device), seed=seed,
        tol=spec["scales"][scale]["tol"],
    )  # fmt: skip
    if scale == "full" and device == "cuda":
        times = {name.removesuffix("_us"): us for name, us in (spec["baselines"] or {}).items()}
        report.baselines = {name: us for name, us in times.items() if us is not None}
        report.floor_us = spec["floor_us"]
    work = Grading(bundle, solution, spec, report, device, time_limit)
    with contextlib.closing(work) as grading:
        grading.grade(runs)
    return report


def device_name(device: str) -> str:
    """What a report calls the device."""
    return torch.cuda.get_device_name() if device == "cuda" else device


class Grading:
    """One solution's grading, filling in a report."""

    def __init__(
        self, bundle: Path, solution: Path, spec: dict[str, Any], report: Report, device: str,
        time_limit: float,
    ) -> None:  # fmt: skip
        self.bundle, self.solution, self.report = bundle.resolve(), solution.resolve(), report
        self.scale: dict[str, Any] = spec["scales"][report.scale]
        self.paged: bool = spec["kind"] == "paged"
        self.per_sequence: bool = spec["per_sequence_pos"]
        self.device, self.time_limit = device, time_limit
        self.reference: ModuleType = load(self.bundle / "reference.py", "mega_reference")
        self.worker: Worker | None = None
        self.has_teardown = False
        self.step: int | None = None
        self.overhead_us = 0.0

    def close(self) -> None:
        """Ends the solution's process."""
        if self.worker is not None:
            self.worker.close()

    def grade(self, runs: int) -> None:
        """Runs until the solution cannot be graded further; findings end nothing by themselves."""
        poisons = [None, "foreign_pages", "unwritten_slots"]
        if not self.paged:
            poisons.remove("foreign_pages")
        seeds = random.Random(self.report.seed)  # noqa: S311 - must be repeatable
        # A generator of its own: no seed that the solution's process gets leads to the tokens.
        tokens = random.Random(f"tokens {self.report.seed}")  # noqa: S311 - must be repeatable
        observed: list[checks.Observed] = []
        for number in range(1, runs + 1):
            run = {
                "weights_seed": seeds.getrandbits(48),
                "cache_seed": seeds.getrandbits(48),
                "poison": poisons[(number - 1) % len(poisons)],
            }
            self.step = None
            try:
                worker = self.started()
                seen = self.drive(worker, run, tokens)
                findings = self.judge(worker, run, seen, observed)
                self.add(number, *findings)
                observed.append(seen)
                self.finish(worker)
            except SolutionError as error:
                self.add(number, dataclasses.replace(error.finding, step=self.step))
                break
        warm_up = min(max(1, self.scale["decode_steps"] // 4), self.scale["decode_steps"] - 1)
        times = [us for seen in observed for us in seen.times_us[warm_up:]]
        self.report.timing = Timing.of(times) if times else None

    def add(self, number: int, *findings: Finding) -> None:
        """Reports findings of a run."""
        self.report.findings += [dataclasses.replace(finding, run=number) for finding in findings]

    def started(self) -> Worker:
        """The process, with the solution imported."""
        if self.worker is None:
            self.worker = worker = Worker(self.time_limit)
            reference = str(self.bundle / "reference.py")
            worker.request(
                {"do": "start", "reference": reference, "device": self.device}, "its start"
            )
            names = ("build_model", "decode_step", "teardown")
            command = {"do": "solution", "path": str(self.solution)}
            has = worker.request(command, "its import", keys=names)
            for name in names[:2]:
                if not has[name]:
                    raise SolutionError(Finding("import", f"expected a function {name}, got none"))
            self.has_teardown = has["teardown"]
        return self.worker

    def drive(self, worker: Worker, run: dict[str, Any], tokens: random.Random) -> checks.Observed:
        """Lets the solution build a model and decode, one unforeseeable token after the other."""
        worker.request(
            {"do": "inputs", "scale": self.scale, "run": run}, "the making of its inputs"
        )
        rehearsal = checks.Observed()
        for _ in range(REHEARSALS):
            self.request_step(worker, "rehearse", 0, tokens, rehearsal)
        self.overhead_us = statistics.median(rehearsal.outside_us())
        worker.request({"do": "build"}, "build_model")
        worker.check_children("build_model")
        observed = checks.Observed()
        shape = (self.scale["batch"], self.scale["cfg"]["vocab"])
        for step in range(self.scale["decode_steps"]):
            self.step = step
            about = self.request_step(worker, "step", step, tokens, observed)
            dtype = checks.check_returned(about, shape, self.device)
            logits = torch.empty(shape, dtype=dtype)
            worker.request({"do": "logits"}, "decode_step", payload=data_of(logits))
            observed.logits.append(logits)
            worker.check_children("decode_step")
        self.step = None
        return observed

    def request_step(
        self, worker: Worker, do: str, step: int, tokens: random.Random, seen: checks.Observed
    ) -> dict[str, Any]:
        """Times one step from outside; returns what the process says about it."""
        ids = [tokens.randrange(self.scale["cfg"]["vocab"]) for _ in self.scale["prefill_lens"]]
        command = {"do": do, "index": step, "tokens": ids, "pos": self.position(step)}
        phase = "decode_step" if do == "step" else "a step without the solution"
        start = time.perf_counter()
        about = worker.request(command, phase, keys=("us",))
        seen.walls_us.append((time.perf_counter() - start) * 1e6)
        seen.times_us.append(checks.checked_time(about["us"]))
        seen.tokens.append(ids)
        return about

    def position(self, step: int) -> int | list[int]:
        """What `pos` is in a step."""
        positions: list[int] = [length + step for length in self.scale["prefill_lens"]]
        return positions if self.per_sequence else positions[0]

    def judge(
        self, worker: Worker, run: dict[str, Any], seen: checks.Observed,
        earlier: list[checks.Observed],
    ) -> list[Finding]:  # fmt: skip
        """Compares what the solution did with what the reference does."""
        weights, kv_cache = make_inputs(self.reference, self.scale, run, self.device)
        given = [*tensors_in(weights, "weights"), *tensors_in(kv_cache, "kv_cache")]
        original = {path: x.clone() if x.dim() == 4 else x for path, x in given}
        expected = list(self.expect(weights, kv_cache, seen))
        error, findings = checks.check_logits(
            seen, expected, earlier, run["poison"], self.scale["tol"]
        )
        self.report.errors.append(error)
        keys = ("cfg", "replaced")
        state = worker.request({"do": "state"}, "the reading of its state", keys=keys)
        if state["cfg"] != self.scale["cfg"]:
            detail = f"expected {self.scale['cfg']}, as it was given, got {state['cfg']}"
            findings.append(Finding("cfg", detail))
        if state["replaced"]:
            detail = f"other tensors, or none, at {', '.join(state['replaced'])}"
            findings.append(Finding("arguments", detail))

        def read(path: str, like: Tensor) -> Tensor:
            copy = torch.empty(like.shape, dtype=like.dtype)
            command = {"do": "read", "path": path}
            worker.request(command, f"the reading of {path}", payload=data_of(copy))
            return copy.to(like.device)

        findings += checks.check_memory(read, original, kv_cache, self.scale)
        return [*findings, *checks.check_clock(seen, self.overhead_us, self.device)]

    def expect(self, weights: Any, kv_cache: Any, seen: checks.Observed) -> Iterator[Tensor]:
        """The reference's logits of each step, on the CPU; its cache is appended to."""
        cfg = self.scale["cfg"]
        handle = self.reference.build_model(weights, kv_cache, cfg, self.scale["max_seq"])
        for step, tokens in enumerate(seen.tokens):
            pos: Any = self.position(step)
            if isinstance(pos, list):
                pos = torch.tensor(pos, device=self.device)
            ids = torch.tensor(tokens, device=self.device)
            logits = self.reference.decode_step(handle, ids, pos).cpu()
            if not logits.isfinite().all():
                raise BundleError(f"reference: expected finite logits, got others in step {step}")
            yield logits

    def finish(self, worker: Worker) -> None:
        """Ends a run, and the process if a solution without a teardown left a kernel running."""
        if self.has_teardown:
            worker.request({"do": "teardown"}, "teardown")
            worker.request({"do": "finish"}, "the wait for the device after teardown")
        else:
            try:
                worker.request({"do": "finish"}, "the wait for the device", within=IDLE_S)
            except TimeoutError:
                worker.close()
                self.worker = None
        if self.device == "cuda":
            torch.cuda.empty_cache()
