# SPDX-License-Identifier: Apache-2.0
"""Selection in a trace of torch.compile, with fullgraph=True throughout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import astrai_core
from astrai_core.ops import _select, _traced
from conftest import Site

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own
    pytest.mark.usefixtures("no_earlier_trace"),
]

# As a family registers its ops: in the namespace of its import name. The operator of swiglu is this
# package's own, and calls the family's function.
NATIVE = """
import torch
import torch.nn.functional as F

calls = []
name = __name__.partition(".")[0]
lib = torch.library.Library(name, "DEF")
lib.define("bf16_gemv(Tensor x, Tensor weight, Tensor? bias, bool static_weights) -> Tensor")

def gemv(x, weight, bias, static_weights):
    calls.append(("bf16_gemv", tuple(x.shape)))
    return F.linear(x, weight, bias)

lib.impl("bf16_gemv", gemv, "CPU")
torch.library.register_fake(
    f"{name}::bf16_gemv", lambda x, w, *_: x.new_empty(x.shape[0], w.shape[0]), lib=lib
)

def bf16_gemv(*_):
    raise AssertionError("a trace calls the registered operator")

def bf16_swiglu(x, up, gate):
    assert (x.data_ptr() | up.data_ptr() | gate.data_ptr()) % 16 == 0
    calls.append(("bf16_swiglu", tuple(x.shape)))
    return F.linear(x, up) * F.silu(F.linear(x, gate))
"""
_numbers = itertools.count()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def off_boundary(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def mlp(x: Tensor, up: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return astrai_core.swiglu(x, up, gate) + astrai_core.linear(x, up, bias)


def eager(x: Tensor, up: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, up) * F.silu(F.linear(x, gate)) + F.linear(x, up, bias)


@pytest.fixture
def kernels(site: Site, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A usable family, and traced CPU tensors that seem to be on its GPU; its native module."""
    # A namespace of torch.ops outlives the module that defined it.
    package = site.add(package=f"standin_traced_{next(_numbers)}", native={"_native.py": NATIVE})
    gpus((8, 9))
    monkeypatch.setattr(_traced, "_gpu_of", lambda _x: 0)
    describe = _select.describe
    monkeypatch.setattr(
        _select,
        "describe",
        lambda op, *rest: describe(op, *rest)._replace(gpu=0 if op == "swiglu" else -1),
    )
    return site.native_of(package)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["0", "1", "auto"])
def test_torch_path(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", mode)
    operands = [randn(*s).to(dtype) for s in [(2, 3, 16), (8, 16), (8, 16), (8,)]]
    with torch.no_grad():
        y = torch.compile(mlp, fullgraph=True, backend="eager")(*operands)
    assert torch.equal(y, eager(*operands))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_meta_tensors(dtype: torch.dtype) -> None:
    operands = [torch.empty(s, dtype=dtype, device="meta") for s in [(2, 16), (8, 16), (8, 16), 8]]
    y = torch.compile(mlp, fullgraph=True, backend="eager")(*operands)
    assert (y.shape, y.device.type) == ((2, 8), "meta")


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["x", "up_weight", "gate_weight"])
def test_one_trace_serves_operands_on_and_off_their_boundary(
    kernels: Any, backend: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAI_SWIGLU", "1")
    on = {"x": randn(2, 16), "up_weight": randn(8, 16), "gate_weight": randn(8, 16)}
    off = {**on, name: off_boundary(on[name])}
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(astrai_core.swiglu, fullgraph=True, backend=counter)
    x, up, gate = on.values()
    with torch.no_grad():
        for operands in (on, off, on):
            assert torch.equal(compiled(**operands), F.linear(x, up) * F.silu(F.linear(x, gate)))
    assert kernels.calls == [("bf16_swiglu", (2, 16))] * 2
    assert counter.frame_count == 1


def test_a_demand_is_strict_when_it_runs(kernels: Any) -> None:
    compiled = torch.compile(astrai_core.swiglu, fullgraph=True, backend="eager")
    x, up, gate = randn(2, 16), randn(8, 16), randn(8, 16)
    with torch.no_grad(), astrai_core.use(swiglu="gemv"):
        compiled(x, up, gate)
        with pytest.raises(RuntimeError, match=r"demanded by use\(\): .* start on 16 bytes"):
            compiled(off_boundary(x), up, gate)
    assert kernels.calls == [("bf16_swiglu", (2, 16))]


def test_the_operator_of_swiglu(kernels: Any) -> None:
    operands = randn(2, 3, 16), randn(8, 16), randn(8, 16)
    torch.library.opcheck(torch.ops.astrai_core.swiglu.default, operands)
    assert kernels.calls == []  # its table has no row for these


class Plain(Tensor):
    """A subclass without behaviour of its own."""


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "wrap", [lambda t: TwoTensor(t, t), lambda t: t.as_subclass(Plain)], ids=["two", "plain"]
)
def test_subclasses_are_torchs(
    kernels: Any, which: int, wrap: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    operands = [randn(2, 16), randn(8, 16)]
    operands[which] = wrap(operands[which])
    with torch.no_grad():
        y = torch.compile(astrai_core.linear, fullgraph=True, backend="eager")(*operands)
        expected = F.linear(*operands)
    assert type(y) is type(expected) and kernels.calls == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_torchs(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    rows, weight = [randn(2, 16), randn(3, 16)], randn(8, 16)
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with torch.no_grad():
        y = torch.compile(astrai_core.linear, fullgraph=True, backend="eager")(x, weight)
    for ours, row in zip(y.unbind(), rows, strict=True):
        torch.testing.assert_close(ours, F.linear(row, weight))
    assert kernels.calls == []


def test_an_operand_without_strides_is_an_obstacle() -> None:
    """Dynamo refuses sparse inputs, not those that a traced function makes."""
    call = _traced._describe("linear", randn(2, 16), (randn(8, 16).to_sparse(),), None)
    assert call == ("linear", -1, -1, -1, -1, "an operand is sparse or nested")


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_calls_the_kernels(
    kernels: Any, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(randn(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            return astrai_core.swiglu(x, self.weight, self.weight)

    monkeypatch.setenv("ASTRAI_SWIGLU", "1")
    layer, x = Layer(), randn(2, 16)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), strict=strict)
        y = program.module()(x)
    assert torch.equal(y, F.linear(x, layer.weight) * F.silu(F.linear(x, layer.weight)))
    assert kernels.calls == [("bf16_swiglu", (2, 16))]


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


def gated(x: Tensor, up: Tensor, gate: Tensor) -> Tensor:
    return F.linear(x, up) * F.silu(F.linear(x, gate))


def forward_mode(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda a: f(a).float().square().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(lambda a: f(a).sum(), x)[1](torch.ones(()).bfloat16())[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: torch.vmap(f)(x[:, None]),
    "forward_mode": forward_mode,
}


@pytest.fixture
def everywhere(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, demanded wherever they can serve."""
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    monkeypatch.setenv("ASTRAI_SWIGLU", "1")
    return kernels


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("ours", [astrai_core.linear, astrai_core.swiglu])
def test_transforms_are_torchs(
    everywhere: Any, ours: Callable[..., Tensor], transform: Callable[..., Any]
) -> None:
    torchs, number = (F.linear, 1) if ours is astrai_core.linear else (gated, 2)
    x, weights = randn(2, 16), [randn(8, 16) for _ in range(number)]
    compiled = torch.compile(
        lambda: transform(lambda a: ours(a, *weights), x), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(), transform(lambda a: torchs(a, *weights), x))
    assert everywhere.calls == []


@pytest.mark.parametrize("ours", [astrai_core.linear, astrai_core.swiglu])
def test_a_trace_does_not_serve_a_level_opened_later(
    everywhere: Any, ours: Callable[..., Tensor]
) -> None:
    torchs, number = (F.linear, 1) if ours is astrai_core.linear else (gated, 2)
    x, weights = randn(2, 16), [randn(8, 16) for _ in range(number)]
    compiled = torch.compile(lambda a: ours(a, *weights), fullgraph=True, backend="eager")
    with torch.no_grad():
        compiled(x)
        assert len(everywhere.calls) == 1
        tangent = forward_mode(compiled, x)
        assert torch.equal(tangent, forward_mode(lambda a: torchs(a, *weights), x))
    assert len(everywhere.calls) == 1


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "jvp", "forward_mode"])
def test_the_operator_of_swiglu_refuses_transforms(everywhere: Any, transform: str) -> None:
    up, gate = randn(8, 16), randn(8, 16)
    with pytest.raises(RuntimeError):
        TRANSFORMS[transform](lambda a: torch.ops.astrai_core.swiglu(a, up, gate), randn(2, 16))
    assert everywhere.calls == []


@pytest.mark.usefixtures("everywhere")
def test_the_operator_of_swiglu_has_no_backward() -> None:
    x = randn(2, 16).requires_grad_()
    with pytest.raises(RuntimeError, match=r"astrai_core\.swiglu has no derivative"):
        torch.ops.astrai_core.swiglu(x, randn(8, 16), randn(8, 16))
