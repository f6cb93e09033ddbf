# SPDX-License-Identifier: Apache-2.0
"""Selection in a trace of torch.compile, with fullgraph=True throughout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import astrai_core
from astrai_core.ops import _traced
from conftest import Site

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own

# As a family registers its ops: in the namespace of its import name.
NATIVE = """
import torch
import torch.nn.functional as F

calls = []
name = __name__.partition(".")[0]
lib = torch.library.Library(name, "DEF")
lib.define("bf16_gemv(Tensor x, Tensor weight, Tensor? bias, bool static_weights) -> Tensor")
lib.define("bf16_swiglu(Tensor x, Tensor up, Tensor gate, bool static_weights) -> Tensor")

def gemv(x, weight, bias, static_weights):
    calls.append(("bf16_gemv", tuple(x.shape)))
    return F.linear(x, weight, bias)

def swiglu(x, up, gate, static_weights):
    calls.append(("bf16_swiglu", tuple(x.shape)))
    return F.linear(x, up) * F.silu(F.linear(x, gate))

for op, run in (("bf16_gemv", gemv), ("bf16_swiglu", swiglu)):
    lib.impl(op, run, "CPU")
    torch.library.register_fake(
        f"{name}::{op}", lambda x, w, *_: x.new_empty(x.shape[0], w.shape[0]), lib=lib
    )

def bf16_gemv(*_):
    raise AssertionError("a trace calls the registered operator")

bf16_swiglu = bf16_gemv
"""
_numbers = itertools.count()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def mlp(x: Tensor, up: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return astrai_core.swiglu(x, up, gate) + astrai_core.linear(x, up, bias)


def eager(x: Tensor, up: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, up) * F.silu(F.linear(x, gate)) + F.linear(x, up, bias)


@pytest.fixture(autouse=True)
def _no_earlier_trace() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def kernels(site: Site, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A usable family, and traced CPU tensors that seem to be on its GPU; its native module."""
    # A namespace of torch.ops outlives the module that defined it.
    package = site.add(package=f"standin_traced_{next(_numbers)}", native={"_native.py": NATIVE})
    gpus((8, 9))
    monkeypatch.setattr(_traced, "_gpu_of", lambda _x: 0)
    return site.native_of(package)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["0", "1", "auto"])
def test_torch_path(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", mode)
    operands = [randn(*s).to(dtype) for s in [(2, 3, 16), (8, 16), (8, 16), (8,)]]
    with torch.no_grad():
        y = torch.compile(mlp, fullgraph=True, backend="eager")(*operands)
    assert torch.equal(y, eager(*operands))


def test_gradients() -> None:
    operands = [torch.randn(s, requires_grad=True) for s in [(2, 16), (8, 16), (8, 16), (8,)]]
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*operands).square().sum(), operands)
    expected = torch.autograd.grad(eager(*operands).square().sum(), operands)
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("leading", [(), (1,)])
def test_prompts_of_many_lengths_are_two_traces(kernels: Any, leading: tuple[int, ...]) -> None:
    counter = CompileCounter()
    compiled = torch.compile(mlp, fullgraph=True, backend=counter)
    weights = randn(8, 16), randn(8, 16), randn(8)
    with torch.no_grad():
        for length in range(9, 40):
            x = randn(*leading, length, 16)
            assert torch.equal(compiled(x, *weights), eager(x, *weights))
    assert counter.frame_count == 2  # the first length, then any
    assert kernels.calls == []


@pytest.mark.parametrize("tokens", [2, 9])
def test_weights_of_many_shapes(kernels: Any, tokens: int) -> None:
    counter = CompileCounter()
    compiled = torch.compile(astrai_core.linear, fullgraph=True, backend=counter)
    with torch.no_grad():
        for n in range(16, 22):
            x, weight = randn(tokens, n + 8), randn(n, n + 8)
            assert torch.equal(compiled(x, weight), F.linear(x, weight))
    # A kernel is chosen for its sizes; torch's path serves all of them.
    assert (len(kernels.calls), counter.frame_count) == ((6, 6) if tokens == 2 else (0, 2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_kernels_are_operators_of_the_graph(kernels: Any, backend: str) -> None:
    operands = randn(2, 1, 16), randn(8, 16), randn(8, 16), randn(8)
    with torch.no_grad(), astrai_core.use(linear="gemv", swiglu="gemv"):
        compiled = torch.compile(mlp, fullgraph=True, backend=backend)
        for _ in range(2):
            assert torch.equal(compiled(*operands), eager(*operands))
    assert kernels.calls == [("bf16_swiglu", (2, 16)), ("bf16_gemv", (2, 16))] * 2


@pytest.mark.parametrize("dynamic", [False, None])
def test_the_table_decides(kernels: Any, dynamic: bool | None) -> None:
    weight = randn(8, 16)
    compiled = torch.compile(astrai_core.linear, fullgraph=True, backend="eager", dynamic=dynamic)
    with torch.no_grad():
        for m in range(1, 9):
            x = randn(m, 16)
            assert torch.equal(compiled(x, weight), F.linear(x, weight))
    assert [shape[0] for _, shape in kernels.calls] == [2, 3, 4]


@pytest.mark.parametrize(
    "operands",
    [
        lambda: (randn(2, 16).requires_grad_(), randn(8, 16)),
        lambda: (randn(16, 2).t(), randn(8, 16)),
        lambda: (randn(2, 16), randn(8, 16), randn(1)),
        lambda: (randn(2, 16), randn(16)),
        lambda: (randn(9, 16), randn(8, 16)),
        lambda: (randn(0, 16), randn(8, 16)),
    ],
)
def test_what_the_kernel_does_not_serve_is_torchs(
    kernels: Any, operands: Callable[[], tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    tensors = operands()
    y = torch.compile(astrai_core.linear, fullgraph=True, backend="eager")(*tensors)
    assert torch.equal(y, F.linear(*tensors))
    assert kernels.calls == []


def test_gates_that_broadcast_are_torchs(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_SWIGLU", "1")
    monkeypatch.setenv("ASTRAI_GEMV", "0")
    x, up, gate = randn(2, 16), randn(8, 16), randn(1, 16)
    with torch.no_grad():
        y = torch.compile(astrai_core.swiglu, fullgraph=True, backend="eager")(x, up, gate)
    assert torch.equal(y, F.linear(x, up) * F.silu(F.linear(x, gate)))
    assert kernels.calls == []


def test_autocast(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    x, weight = randn(2, 16), randn(8, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        y = torch.compile(astrai_core.linear, fullgraph=True, backend="eager")(x, weight)
        assert y.dtype is F.linear(x, weight).dtype
    assert kernels.calls == []


def test_a_demand_is_strict(kernels: Any) -> None:
    compiled = torch.compile(astrai_core.linear, fullgraph=True, backend="eager")
    with (
        torch.no_grad(),
        astrai_core.use(linear="gemv"),
        pytest.raises(Exception, match=r"gemv is demanded by use\(\): the kernel takes 1 to 8"),
    ):
        compiled(randn(9, 16), randn(8, 16))
    assert kernels.calls == []
