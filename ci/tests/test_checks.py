# SPDX-License-Identifier: Apache-2.0
"""The repository's own checks reject what they are there to reject."""

import check_machine_code
import check_sources
import check_versions
import pytest


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(check_sources, "ROOT", tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.cu", "#include <torch/torch.h>\n", "a.cu:1: a torch header below Python"),
        ("a.h", '\n  # include "c10/core/Device.h"\n', "a.h:2: a torch header below Python"),
        ("a.cuh", "//\n" * 601, "a.cuh: 601 lines, more than 600: split it"),
        ("a.py", "#\n" * 401, "a.py: 401 lines, more than 400: split it"),
        (
            "src/astrai_gemv/a.py",
            "import_module('astrai_core')\n",
            "src/astrai_gemv/a.py:1: names another package than astrai_gemv",
        ),
        (
            "a.md",
            "pip install --index-url " + "https://example.com/",
            "a.md:1: names a package index",
        ),
        ("a.toml", "find-links = " + "['file:///wheels']", "a.toml:1: names a package index"),
    ],
)
def test_a_violation_is_named(file, name, text, error):
    assert check_sources.errors_in(file(name, text)) == [error]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.cu", "#include <cuda_bf16.h>\n// without torch/ATen\n" + "//\n" * 598),
        ("a.py", "'#include <torch/torch.h>'\n"),
        ("src/astrai_gemv/a.py", "import astrai_gemv  # pip install astrai-core[gemv]\n"),
        ("a.md", "pip install --no-index --find-links dist astrai-core\n"),
    ],
)
def test_what_is_allowed_passes(file, name, text):
    assert check_sources.errors_in(file(name, text)) == []


def test_a_binary_file_passes(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\xff\xfe\x00")
    assert check_sources.errors_in(path) == []


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"a": "1", "b": ["80", "90a"]}, None),
        ({"a": 1, "b": []}, "v.a: expected a string like \\d, got 1"),
        ({"a": "1"}, "v.b: missing"),
        ({"a": "1", "b": [], "c": 0}, "v.c: unknown"),
        ({"a": "1", "b": ["sm_80"]}, "v.b[0]: expected a string like \\d+a?, got 'sm_80'"),
        ({"a": "1", "b": "80"}, "v.b: expected a list, got '80'"),
        ([], "v: expected a table, got []"),
    ],
)
def test_the_shape_of_the_matrix(value, error):
    shape = {"a": r"\d", "b": [r"\d+a?"]}
    assert check_versions.shape_errors(value, shape, "v") == ([error] if error else [])


def test_architectures_are_ordered_as_numbers():
    archs = ["100", "90a", "80", "89"]
    assert sorted(archs, key=check_versions.architecture_key) == ["80", "89", "90a", "100"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A family that agrees with its matrix, and the means to write it differently."""
    monkeypatch.setattr(check_versions, "ROOT", tmp_path)
    (tmp_path / "ci").mkdir()
    (tmp_path / "LICENSE").write_text("Apache")
    for config in ("importlinter.ini", "mypy.ini"):
        (tmp_path / "ci" / config).write_text("astrai_x astrai-x")
    folder = tmp_path / "packages/astrai-x"
    folder.mkdir(parents=True)
    (folder / "LICENSE").write_text("Apache")
    (folder / "CMakeLists.txt").write_text(
        "astrai_family(ARCHITECTURES 80 90a 80-virtual\n KERNELS)"
    )
    return folder


FAMILY = {"sass": ["80", "90a"], "ptx": ["80"], "tested": ["90a"]}
EXTRA = [f"astrai-x>=0.1,<0.2; {check_versions.LINUX_ONLY}"]


@pytest.mark.parametrize(
    ("family", "extras", "error"),
    [
        ({}, {}, None),
        ({"sass": ["80"]}, {}, "ARCHITECTURES are not 80 80-virtual"),
        ({"tested": ["89"]}, {}, "tested: 89 is not built"),
        ({}, {"x": ["astrai-x>=0.1"]}, "extra [x] has no bounded astrai-x"),
        ({}, {"all": ["astrai-core[xy]"]}, "extra [all] lacks x"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_a_family_agrees_with_the_matrix(family, extras, error):
    errors = check_versions.family_errors(
        "x", FAMILY | family, {"x": EXTRA, "all": ["astrai-core[x]"]} | extras
    )
    assert not errors if error is None else any(error in e for e in errors)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("13.0", "13.0", None),
        (">=3.10", ">=3.9", "requires-python is not >=3.10"),
        ("torch>=2.10", "torch", "dependencies lack torch>=2.10"),
        ("==13.0.*", "==13.1.*", "the compiler from PyPI is not"),
        ("Apache", "MIT", "LICENSE differs from the repository's"),
    ],
)
def test_a_package_agrees_with_the_repository(repository, old, new, error):
    text = (
        '[project]\nrequires-python = ">=3.10"\ndependencies = ["torch>=2.10"]\n'
        '[tool.x]\nrequires = ["cuda-toolkit[nvcc,cudart,crt,nvvm,cccl]==13.0.*"]\n'
    )
    (repository / "pyproject.toml").write_text(text.replace(old, new))
    (repository / "LICENSE").write_text("Apache".replace(old, new))
    versions = {
        "python": {"supported": ["3.10"]},
        "torch": {"minimum": "2.10"},
        "cuda": {"toolkit": "13.0"},
    }
    errors = check_versions.package_errors(versions, repository)
    assert not errors if error is None else error in errors[0]


REPORT = """ptxas info    : Compiling entry function '_ZN6astrai11gemv_kernelEv' for 'sm_80'
ptxas info    : Function properties for _ZN6astrai11gemv_kernelEv
    24 bytes stack frame, 28 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN6astrai4normEv' for 'sm_80'
ptxas info    : Function properties for _ZN6astrai4normEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""
CODE = """
\t\tFunction : _ZN6astrai11gemv_kernelEv
        /*0000*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R2, RZ ;
\t\tFunction : _ZN6astrai4normEv
        /*0000*/                   EXIT ;
"""
CLEAN = REPORT.replace("28 bytes", "0 bytes").replace("48 bytes", "0 bytes")
UNALIGNED = "_kernelILNS0_9RowSourceE1ELb0ELb0ELi1EEEv"
TRAP = "Function : _ZN6astrai11gemv_kernelEv\n /*0000*/ BPT.TRAP 0x1 ;\n /*0010*/ EXIT ;\n"


def test_machine_code_is_read():
    gemv, norm = check_machine_code.kernels(REPORT)
    assert (gemv.spilled, gemv.registers) == (76, 128)
    assert (norm.spilled, norm.registers) == (0, 40)
    code = check_machine_code.instructions(CODE)
    assert code == {
        gemv.name: {"LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16"},
        norm.name: {"EXIT"},
    }


@pytest.mark.parametrize(
    ("report", "code", "errors"),
    [
        (REPORT, CODE, ["gemv_kernelEv: 76 bytes of registers spilled"]),
        (CLEAN, CODE, []),
        (
            CLEAN,
            CODE.replace("[R1], ", "[R1+UR22], desc[UR23]"),
            [],
        ),
        (
            CLEAN,
            CODE.replace("HMMA", "FFMA"),
            ["gemv_kernelEv: no HMMA.16816.F32.BF16"],
        ),
        (CLEAN, TRAP, []),
        (
            CLEAN,
            CODE.replace("[R1], ", "[R1+UR0+0x200], desc[UR1]"),
            ["gemv_kernelEv: LDGSTS [R+UR0], which is encoded wrongly"],
        ),
        (
            REPORT.replace("_kernelEv", UNALIGNED),
            CODE.replace("_kernelEv", UNALIGNED),
            [f"gemv{UNALIGNED}: 76 bytes of registers spilled"],
        ),
        (
            REPORT.replace("_kernelEv", UNALIGNED).replace("sm_80", "sm_90a"),
            CODE.replace("_kernelEv", UNALIGNED),
            [],
        ),
        (
            CLEAN,
            "",
            ["gemv_kernelEv: no HMMA.16816.F32.BF16", "gemv_kernelEv: no LDGSTS"],
        ),
    ],
)
def test_machine_code_is_judged(report, code, errors):
    found = check_machine_code.errors(
        list(check_machine_code.kernels(report)), check_machine_code.instructions(code)
    )
    assert [error.removeprefix("_ZN6astrai11") for error in found] == errors
