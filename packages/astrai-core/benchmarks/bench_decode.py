# SPDX-License-Identifier: Apache-2.0
"""Grades astrai_core.decode on every whole-model decode task, and times its steps.

Each task's bundle is rendered anew, and graded as any solution of it is: in a process of its own,
with weights, cache and tokens that it has not seen. A row's error is the worst relative one of the
logits. The status is 1 if an implementation fails, whose rows then stay what they were.

A graded step starts when the one before has ended, and its time has the host's calls in it. Rows of
`decode_steps` are of steps back to back, which the host enqueues ahead, as generation does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import astrai_core
from astrai_core.decode import build_model, decode_step, teardown
from kernelkit.results import Environment, Row, merge, results_path
from mega_factory.grader.inputs import load, make_inputs
from mega_factory.render import write
from mega_factory.spec import MegaSpec
from mega_factory.specs import load_all

SOLUTION = Path(__file__).with_name("decode_solution.py")
PROVIDERS = {"composed": "astrai", "torch": "torch"}
ROUNDS = 11


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="names of tasks")
    return parser


def graded(spec: MegaSpec, implementation: str, bundle: Path, where: Environment) -> Row | None:
    """The row of an implementation on a task; None if it does not pass, as its report says."""
    report = bundle.with_name("report.json")
    done = subprocess.run(
        [sys.executable, bundle / "grade.py", SOLUTION, "--json", report],
        env={**os.environ, "ASTRAI_DECODE": implementation},
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{implementation}: {done.stdout}{done.stderr}", end="", flush=True)
    if done.returncode != 0:
        return None
    found = json.loads(report.read_text("utf-8"))
    median, error = found["timing"]["median_us"], max(found["errors"])
    return row_of(spec, "decode", implementation, where, median, error)


def back_to_back(
    spec: MegaSpec, implementation: str, bundle: Path, scale: str = "full", device: str = "cuda"
) -> float:
    """Microseconds of a step among as many as the task has; the median of rounds."""
    sizes = json.loads((bundle / "spec.json").read_text("utf-8"))["scales"][scale]
    reference = load(bundle / "reference.py", "mega_reference")
    run = dict.fromkeys(("weights_seed", "cache_seed", "rewrite_seed"), 0)
    weights, kv_cache, _ = make_inputs(reference, sizes, run, device)
    with astrai_core.use(decode=implementation):
        handle = build_model(weights, kv_cache, sizes["cfg"], sizes["max_seq"])
    lens, steps = sizes["prefill_lens"], range(sizes["decode_steps"])
    ids = torch.randint(sizes["cfg"]["vocab"], (len(steps), len(lens)), device=device)
    first: int | Tensor = torch.tensor(lens, device=device) if spec.per_sequence_pos else lens[0]
    positions = [first + step for step in steps]
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for step in steps:
            decode_step(handle, ids[step], positions[step])
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / len(steps) * 1e6)
    teardown(handle)
    return statistics.median(times[1:])  # the first one warms up


def row_of(
    spec: MegaSpec, op: str, implementation: str, where: Environment, median_us: float,
    error: float | None = None,
) -> Row:  # fmt: skip
    """A row of an implementation on a task."""
    return where.row(
        "core",
        op,
        f"task={spec.name},B={spec.batch},context={max(spec.lens)}",
        PROVIDERS[implementation],
        median_us,
        bytes_moved=spec.weight_bytes + spec.kv_bytes,
        error=error,
    )


def main() -> None:
    """Grades both implementations on the tasks that the command line names, or on all."""
    options, where = parser().parse_args(), Environment.current()
    specs, results = load_all(), results_path(options.results, where.gpu, "decode")
    failed = []
    for name in options.only or sorted(specs):
        spec = specs[name]
        for implementation in PROVIDERS:
            with tempfile.TemporaryDirectory() as folder:
                bundle = write(spec, Path(folder))
                row = graded(spec, implementation, bundle, where)
                if row is None:
                    failed.append(f"{name}: {implementation} does not pass")
                    continue
                time_us = back_to_back(spec, implementation, bundle)
            merge(results, [row, row_of(spec, "decode_steps", implementation, where, time_us)])
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
