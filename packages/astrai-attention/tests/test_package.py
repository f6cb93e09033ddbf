# SPDX-License-Identifier: Apache-2.0
"""The package without a GPU: lazy imports, the built module, the traced operators."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import astrai_attention
import astrai_attention._library  # registers the operators
from astrai_attention import _family
from kernelkit import wheels
from kernelkit.wheels import python

BF16 = torch.bfloat16
NATIVE = "astrai_attention._attention"


def test_the_manifest_imports_neither_torch_nor_native_code() -> None:
    loaded = python(
        "import astrai_attention._family, sys; print('torch' in sys.modules, *sys.modules)"
    )
    assert loaded.startswith("False")
    assert NATIVE not in loaded.split()


def test_the_entry_point_names_the_manifest() -> None:
    (entry,) = importlib.metadata.entry_points(group="astrai.families", name="attention")
    assert entry.load() is _family
    assert entry.dist is not None and entry.dist.name == "astrai-attention"


def test_the_manifest_lists_the_public_ops() -> None:
    helpers = {"Q_TILE_ROWS", "decode_workspace_size", "q_tile_schedule"}
    assert {*_family.OPS} == {*astrai_attention.__all__} - helpers
    assert _family.CUDA is not None and _family.SASS + _family.PTX


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rotary_embedding'"):
        _ = astrai_attention.rotary_embedding


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
    assert wheels.exported_symbols(NATIVE) == ["PyInit__attention"]


def test_the_stub_names_what_the_module_has() -> None:
    from astrai_attention import _attention

    assert wheels.stub_names(NATIVE) == {n for n in dir(_attention) if not n.startswith("_")}


def test_importing_the_ops_touches_no_device() -> None:
    # A process that has used the driver cannot fork and use it again; one that has not can.
    code = (
        "import torch; from astrai_attention import rotary_emb; print(torch.cuda.is_initialized())"
    )
    assert python(code) == "False\n"


def test_a_wheel_without_kernels_says_so(tmp_path: Path) -> None:
    package = tmp_path / "astrai_attention"
    package.mkdir()
    for source in Path(astrai_attention.__file__).parent.glob("*.py"):
        if source.name != "_build.py":
            (package / source.name).write_bytes(source.read_bytes())
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch, astrai_attention\n"
        "x = torch.ones(1)\n"
        "try: astrai_attention.rotary_emb(x, x, x, interleaved=True)\n"
        "except RuntimeError as error: print(error)"
    )
    text = python(code).strip()
    assert text.startswith("astrai_attention.rotary_emb: this wheel was built without kernels")
    assert text.endswith("pip install --force-reinstall --no-cache-dir --no-deps astrai-attention")


def test_fakes_give_shapes() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 5, 3, 32, dtype=BF16)
        t = torch.empty(5, 16)
        ops = torch.ops.astrai_attention
        assert ops.rotary_emb(x, t, t, True).shape == x.shape
        assert ops.rotary_emb(x[0], t, t, False).shape == x[0].shape
        sliced = ops.rotary_emb(x[:, :, 1:], t.expand(2, 5, 16), t.expand(2, 5, 16), False)
        assert sliced.shape == (2, 5, 2, 32) and sliced.is_contiguous()
        assert ops.rotary_emb_out(x, t, t, True, x.clone()) is None
        assert ops.rotary_emb_(x, t, t, True) is None
        with pytest.raises(ValueError, match=r"sin: expected shape \[seq, 16\]"):
            ops.rotary_emb(x, t, torch.empty(5, 32), True)
        with pytest.raises(TypeError, match="cos: expected dtype float32"):
            ops.rotary_emb(x, t.double(), t, True)
        with pytest.raises(ValueError, match=r"x: expected shape \[tokens, heads, head_dim\]"):
            ops.rotary_emb(x[0, 0], t, t, True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("where", ["new", "in place", "apart"])
def test_compiled_code_calls_the_operator(backend: str, where: str) -> None:
    """fullgraph tracing works; running on a CPU then ends in the op's own error."""

    @torch.compile(fullgraph=True, backend=backend)
    def layer(x: torch.Tensor, t: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
        out = {"new": None, "in place": x, "apart": spare}[where]
        return astrai_attention.rotary_emb(x, t, t, interleaved=True, out=out) + 1

    x, t = torch.ones(5, 3, 32, dtype=BF16), torch.ones(5, 16)
    with torch.no_grad(), pytest.raises(ValueError, match="x: expected a CUDA tensor"):
        layer(x, t, x.clone())


def test_traced_calls_do_not_lose_gradients() -> None:
    compiled = torch.compile(astrai_attention.rotary_emb, fullgraph=True, backend="eager")
    x, t = torch.ones(5, 3, 32, dtype=BF16, requires_grad=True), torch.ones(5, 16)
    with pytest.raises(Exception, match="an input requires grad, and this op has no backward"):
        compiled(x, t, t, interleaved=True)
