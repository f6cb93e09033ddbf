# SPDX-License-Identifier: Apache-2.0
"""Grades astrai_core.decode on every whole-model decode task, and keeps the times of its steps.

Each task's bundle is rendered anew, and graded as any solution of it is: in a process of its own,
with weights, cache and tokens that it has not seen. A row's error is the worst relative one of the
logits. The status is 1 if an implementation fails, whose row then stays what it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kernelkit.results import Environment, Row, merge, results_path
from mega_factory.render import write
from mega_factory.spec import MegaSpec
from mega_factory.specs import load_all

SOLUTION = Path(__file__).with_name("decode_solution.py")
PROVIDERS = {"composed": "astrai", "torch": "torch"}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="names of tasks")
    return parser


def graded(spec: MegaSpec, implementation: str, folder: Path, where: Environment) -> Row | None:
    """The row of an implementation on a task; None if it does not pass, as its report says."""
    bundle, report = write(spec, folder), folder / "report.json"
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
    return where.row(
        "core",
        "decode",
        f"task={spec.name},B={spec.batch},context={max(spec.lens)}",
        PROVIDERS[implementation],
        found["timing"]["median_us"],
        bytes_moved=spec.weight_bytes + spec.kv_bytes,
        error=max(found["errors"]),
    )


def main() -> None:
    """Grades both implementations on the tasks that the command line names, or on all."""
    options, where = parser().parse_args(), Environment.current()
    specs, results = load_all(), results_path(options.results, where.gpu, "decode")
    failed = []
    for name in options.only or sorted(specs):
        for implementation in PROVIDERS:
            with tempfile.TemporaryDirectory() as folder:
                row = graded(specs[name], implementation, Path(folder), where)
            if row is None:
                failed.append(f"{name}: {implementation} does not pass")
            else:
                merge(results, [row])
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
