# SPDX-License-Identifier: Apache-2.0
"""``python -m mega_factory``: `list`, `render`, `check`, `grade` and `verify`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mega_factory import render, specs, verify


def _list() -> int:
    for spec in specs.load_all().values():
        note = "" if spec.note is None else f"  ({spec.note})"
        print(f"{spec.name}  {spec.hash()}  {spec.title}{note}")
    return 0


def _render(folder: Path, names: Sequence[str]) -> int:
    tasks = [specs.load(name) for name in names] or specs.load_all().values()
    try:
        for spec in tasks:
            print(render.write(spec, folder))
    except OSError as error:
        reason = f"expected one to write to, got {folder}: {error.strerror}"
        raise ValueError(f"folder: {reason}") from error
    return 0


def _check(folder: Path) -> int:
    tasks = specs.load_all()
    found = [text for spec in tasks.values() for text in render.drift(spec, folder)]
    found += render.orphans(tasks, folder)
    for text in found:
        print(text)
    return 1 if found else 0


def _grade(bundle: Path, arguments: Sequence[str]) -> int:
    # In a process of its own, as whoever has only the bundle runs it.
    return subprocess.run([sys.executable, bundle / "grade.py", *arguments], check=False).returncode


def _verify(name: str, scale: str, device: str, steps: int | None, file: Path | None) -> int:
    spec = specs.load(name)
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"expected a file to write, got {file}: {error.strerror}"
            raise ValueError(f"json: {reason}") from error
    measured = verify.measure(spec, scale, device, steps)
    rows = list(verify.comparison(spec, measured))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for what, claim, found in rows:
        print(f"{what:{widths[0]}}  {claim:{widths[1]}}  {found}".rstrip())
    if file is not None:
        file.write_text(json.dumps(measured, indent=2) + "\n", "utf-8")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    result = argparse.ArgumentParser(prog="python -m mega_factory")
    commands = result.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name, hash and title of each task, what its tolerance lacks")
    command = commands.add_parser("render", help="write bundles")
    command.add_argument("folder", type=Path)
    command.add_argument("names", nargs="*", metavar="spec", help="tasks, by default all")
    command = commands.add_parser(
        "check", help="compare bundles with the specs; status 1 if any differs"
    )
    command.add_argument("folder", type=Path)
    command = commands.add_parser("grade", help="run a bundle's grade.py", add_help=False)
    command.add_argument("bundle", type=Path)
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="of grade.py")
    command = commands.add_parser("verify", help="measure what a spec claims")
    command.add_argument("name", metavar="spec")
    command.add_argument("--scale", choices=["tiny", "full"], default="full")
    command.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda", help="by default cuda"
    )
    command.add_argument("--steps", type=int, help="fewer than the task's: a CPU is slow")
    command.add_argument("--json", type=Path, help="also write the measurement here")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    args = parser().parse_args(argv)
    try:
        match args.command:
            case "list":
                return _list()
            case "render":
                return _render(args.folder, args.names)
            case "check":
                return _check(args.folder)
            case "grade":
                return _grade(args.bundle, args.arguments)
            case _:
                return _verify(args.name, args.scale, args.device, args.steps, args.json)
    except ValueError as error:
        print(f"mega_factory: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
