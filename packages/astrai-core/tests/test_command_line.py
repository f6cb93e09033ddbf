# SPDX-License-Identifier: Apache-2.0
"""The command as a process: what it is told by variables, and where its output goes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

ASCII = r"""
import io, sys
from astrai_core import __main__, doctor
doctor.run = lambda _: print("blau \u0444") or 0
sys.stdout.reconfigure(encoding="ascii", errors="strict")
sys.exit(__main__.main(["doctor"]))
"""


def command(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-W", "ignore", "-m", "astrai_core", *words]
    return subprocess.run(line, check=False, text=True, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "variable", ["ASTR_BACKEND", "ASTRAI_GEMV", "ASTRAI_SWIGLU", "ASTRAI_DECODE"]
)
def test_generate_checks_every_variable_before_it_loads(variable: str) -> None:
    done = command("generate", "--model", "no such file", env=os.environ | {variable: "bad"})
    assert done.returncode == 2
    assert done.stderr.startswith(f"astrai_core generate: {variable}: expected ")
    assert done.stderr.endswith(", got 'bad'\n") and done.stderr.count("\n") == 1


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command("doctor", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_text_of_any_language_goes_to_ascii(run_python: Callable[..., str]) -> None:
    assert run_python(ASCII) == "blau \\u0444\n"
