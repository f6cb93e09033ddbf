# SPDX-License-Identifier: Apache-2.0
"""The package without a GPU: lazy imports, the built module, the traced operators."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import astrai_gemv
import astrai_gemv._library  # registers the operators
from astrai_gemv import _family
from kernelkit import wheels
from kernelkit.wheels import python

BF16 = torch.bfloat16
NATIVE = "astrai_gemv._gemv"


def test_the_manifest_imports_neither_torch_nor_native_code() -> None:
    loaded = python("import astrai_gemv._family, sys; print('torch' in sys.modules, *sys.modules)")
    assert loaded.startswith("False")
    assert NATIVE not in loaded.split()


def test_the_entry_point_names_the_manifest() -> None:
    (entry,) = importlib.metadata.entry_points(group="astrai.families", name="gemv")
    assert entry.load() is _family
    assert entry.dist is not None and entry.dist.name == "astrai-gemv"


def test_the_manifest_lists_the_public_ops() -> None:
    assert sorted(_family.OPS) == sorted(astrai_gemv.__all__)
    assert _family.CUDA is not None and _family.SASS + _family.PTX


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'bf16_gemm'"):
        _ = astrai_gemv.bf16_gemm


def test_undefined_symbols_name_no_torch() -> None:
    undefined = wheels.undefined_symbols(NATIVE)
    assert "PyObject" in undefined  # nm and its flags work
    assert not re.search(r"\b(torch|at|c10)::", undefined)
    # The driver is asked for by the static runtime at run time, not linked.
    assert not re.search(r"\bcu(da)?[A-Z]\w+", undefined)


def test_needed_libraries_are_those_of_the_system() -> None:
    needed = wheels.needed_libraries(NATIVE)
    allowed = re.compile(r"lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux.*")
    assert needed and all(allowed.fullmatch(library) for library in needed), needed


def test_only_the_module_is_exported() -> None:
    assert wheels.exported_symbols(NATIVE) == ["PyInit__gemv"]


def test_the_stub_names_what_the_module_has() -> None:
    from astrai_gemv import _gemv

    assert wheels.stub_names(NATIVE) == {n for n in dir(_gemv) if not n.startswith("_")}


def test_importing_the_ops_touches_no_device() -> None:
    # A process that has used the driver cannot fork and use it again; one that has not can.
    code = "import torch; from astrai_gemv import bf16_gemv; print(torch.cuda.is_initialized())"
    assert python(code) == "False\n"


def test_a_wheel_without_kernels_says_so(tmp_path: Path) -> None:
    package = tmp_path / "astrai_gemv"
    package.mkdir()
    for source in Path(astrai_gemv.__file__).parent.glob("*.py"):
        if source.name != "_build.py":
            (package / source.name).write_bytes(source.read_bytes())
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch, astrai_gemv\n"
        "try: astrai_gemv.bf16_gemv(torch.ones(1), torch.ones(1, 1))\n"
        "except RuntimeError as error: print(error)\n"
        "try: astrai_gemv.bf16_swiglu(torch.ones(1), torch.ones(1, 1), torch.ones(1, 1))\n"
        "except RuntimeError as error: print(error)"
    )
    first, second = python(code).splitlines()
    assert "astrai_gemv.bf16_gemv: this wheel was built without kernels" in first
    assert "astrai_gemv.bf16_swiglu: this wheel was built without kernels" in second
    command = "pip install --force-reinstall --no-cache-dir --no-deps astrai-gemv"
    assert first.endswith(command) and second.endswith(command)


def test_fakes_give_shapes() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 64, dtype=BF16)
        w = torch.empty(32, 64, dtype=BF16)
        ops = torch.ops.astrai_gemv
        assert ops.bf16_gemv(x, w, None, False).shape == (3, 32)
        assert ops.bf16_gemv(x[0], w, None, True).shape == (32,)
        assert ops.bf16_swiglu(x, w, w, False).shape == (3, 32)
        assert [t.shape for t in ops.add_rms_norm(x, x, x[0], 1e-5, False)] == [x.shape, x.shape]


def test_compiled_code_calls_the_operator() -> None:
    """fullgraph tracing works; running on a CPU then ends in the op's own error."""

    @torch.compile(fullgraph=True, backend="eager")
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return astrai_gemv.bf16_gemv(x, w) + 1

    with torch.no_grad(), pytest.raises(ValueError, match="x: expected a CUDA tensor"):
        layer(torch.ones(2, 64, dtype=BF16), torch.ones(32, 64, dtype=BF16))


@pytest.mark.parametrize("op", ["bf16_gemv", "bf16_swiglu"])
def test_compiled_code_refuses_an_out_that_requires_grad(op: str) -> None:
    x, w = torch.ones(2, 64, dtype=BF16), torch.ones(32, 64, dtype=BF16)
    out = torch.ones(2, 32, dtype=BF16, requires_grad=True)
    weights = (w,) if op == "bf16_gemv" else (w, w)
    compiled = torch.compile(getattr(astrai_gemv, op), backend="eager")
    with pytest.raises(Exception, match=r"requires grad, and .* has no backward"):
        compiled(x, *weights, out=out)
