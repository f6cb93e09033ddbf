# SPDX-License-Identifier: Apache-2.0
"""``python -m astrai_core``: `doctor` and `generate`."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys

_COMMANDS = {
    "doctor": "say what this machine has, which implementation serves each op, and why",
    "generate": "generate text with a small language model",
}


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status, 141 if nobody reads its output to the end."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A text of any language may have to go to a terminal or a file that is ASCII.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell says of a process that SIGPIPE ended
    return status


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m astrai_core")
    commands = parser.add_subparsers(dest="command", required=True)
    argv = sys.argv[1:] if argv is None else argv
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        # Only the chosen one is imported: doctor must work where generate's requirements are not.
        if name in argv[:1]:
            importlib.import_module(f".{name}", __package__).add_arguments(command)
    args = parser.parse_args(argv)
    module = importlib.import_module(f".{args.command}", __package__)
    status: int = module.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
