# SPDX-License-Identifier: Apache-2.0
"""The command line of a bundle's grade.py."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from .grading import RUNS, TIME_LIMIT_S, BundleError, grade

STATUS = {"pass": 0, "fail": 1, "repeat": 2}


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    result = argparse.ArgumentParser(
        prog="grade.py",
        description="Grade a solution. Exit status: 0 passed, 1 failed, 2 not graded.",
    )
    result.add_argument("solution", type=Path, help="a Python file, see TASK.md")
    result.add_argument("--scale", choices=["tiny", "full"], default="full")
    result.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    result.add_argument("--seeds", type=int, default=RUNS, help="runs, each with fresh inputs")
    result.add_argument(
        "--seed", type=int, help="repeat what reported this seed: no grade, status 2 or 1"
    )
    result.add_argument(
        "--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for the solution"
    )
    result.add_argument("--json", type=Path, help="also write the report here")
    return result


def main(bundle: Path) -> int:
    """Grades by the command line and prints the report; returns the exit status."""
    options = parser().parse_args()
    if options.json is not None and not options.json.parent.is_dir():
        print(f"grade.py: --json: expected a file in a folder, got {options.json}", file=sys.stderr)
        return 2
    try:
        report = grade(
            bundle, options.solution, scale=options.scale, device=options.device,
            runs=options.seeds, time_limit=options.time_limit, seed=options.seed,
        )  # fmt: skip
        print(report.text())
        if options.json is not None:
            options.json.write_text(report.json() + "\n", "utf-8")
    except BundleError as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 2
    except Exception:  # noqa: BLE001 - left alone, its exit status would be that of a failed solution
        traceback.print_exc()
        return 2
    return STATUS[report.verdict]


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
