# SPDX-License-Identifier: Apache-2.0
"""What a family's built module is made of, for the tests of every family."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def run(*command: str) -> str:
    """What a command prints; it has to succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def python(code: str) -> str:
    """What code prints in an interpreter of its own."""
    return run(sys.executable, "-c", code)


def path_of(module: str) -> Path:
    """Where a module lies, which is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{module}: not installed, or without a file")
    return Path(spec.origin)


def undefined_symbols(module: str) -> str:
    """What a native module wants from others, demangled, one a line."""
    return run("nm", "-DC", "--undefined-only", str(path_of(module)))


def needed_libraries(module: str) -> set[str]:
    """The libraries that a native module links."""
    return set(re.findall(r"NEEDED.*\[(.+?)\]", run("readelf", "-d", str(path_of(module)))))


def exported_symbols(module: str) -> list[str]:
    """What a native module offers to others."""
    defined = run("nm", "-D", "--defined-only", str(path_of(module))).split("\n")
    return [line.split()[-1] for line in defined if line]


def stub_names(module: str) -> set[str]:
    """Functions and classes of the stub beside a native module."""
    stub = path_of(module).parent / f"{module.rpartition('.')[2]}.pyi"
    body = ast.parse(stub.read_text("utf-8")).body
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def image_arch(sass: Iterable[str], ptx: Iterable[str], device_arch: int) -> int:
    """The architecture of the code that the driver takes of a wheel's for a device, 0 for none.

    Machine code runs from its minor version on, that of an `a` target on no other; failing that,
    PTX is compiled.
    """
    images = [arch for arch in sass if not arch.endswith("a") or arch == f"{device_arch}a"]
    numbers = [int(arch.rstrip("a")) for arch in images]
    machine = [n for n in numbers if n // 10 == device_arch // 10 and n <= device_arch]
    return max(machine or [n for n in map(int, ptx) if n <= device_arch], default=0)
