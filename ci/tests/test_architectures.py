# SPDX-License-Identifier: Apache-2.0
"""What ASTRAI_CUDA_ARCH means to the build."""

import os
import subprocess
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[2] / "shared_csrc" / "cmake" / "AstraiFamily.cmake"


def configured(request, tmp_path):
    """The exit status, and what is said, of a family that has code for several architectures."""
    script = tmp_path / "script.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.24)\n"
        f'include("{MODULE}")\n'
        'astrai_architectures("80;90a;80-virtual" found)\n'
        'message("found [${found}]")\n'
    )
    done = subprocess.run(
        ["cmake", "-P", script],
        env={**os.environ, "ASTRAI_CUDA_ARCH": request},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        ("80", "80"),
        (" 80 ", "80"),
        ("80;", "80"),
        ("90a, 80-virtual", "90a;80-virtual"),
        (";120;86-real;", "120;86-real"),
    ],
)
def test_lists_in_any_form(request_, found, tmp_path):
    assert configured(request_, tmp_path) == (0, f"found [{found}]\n")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("sm_80", "expected architectures such as 80, 90a or 80-virtual, got 'sm_80'"),
        ("8.0", "expected architectures such as 80, 90a or 80-virtual, got '8.0'"),
        ("90a-virtual", "PTX of an 'a' target runs nowhere else, got '90a-virtual'"),
        ("90a;75", "the kernels need 80 or newer, got '75'"),
        ("0", "the kernels need 80 or newer, got '0'"),
    ],
)
def test_what_is_none_is_named(request_, message, tmp_path):
    status, said = configured(request_, tmp_path)
    assert status == 1
    assert f"ASTRAI_CUDA_ARCH: {message}" in " ".join(said.split())
