# SPDX-License-Identifier: Apache-2.0
"""What hooks into torch's dispatcher, which a kernel's call passes by: such calls are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import astrai_core
from astrai_core import policy
from conftest import Site

# torch uses its own deprecated torch.jit here.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@pytest.fixture(autouse=True)
def kernels(site: Site, seen_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ARG001
    """The stand-in kernels wherever they can serve; their results are off by 100."""
    package = site.add()
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    with torch.no_grad():
        yield site.native_of(package)


def two_operands(x: Tensor, weight: Tensor) -> Tensor:
    """A linear as a tracer takes it: without a default argument."""
    return astrai_core.linear(x, weight)


def passed_over(call: Callable[[], Any]) -> str:
    """Why torch ran the one linear of a call."""
    with astrai_core.explain() as report:
        call()
    (row,) = report.rows
    assert row.chosen == "torch"
    return row.passed_over["gemv"]


def test_the_fixture_would_be_noticed(kernels: Any) -> None:
    x, weight = randn(2, 8), randn(4, 8)
    assert torch.equal(astrai_core.linear(x, weight), F.linear(x, weight) + 100)
    assert kernels.calls == [(2, 8)]


@pytest.mark.parametrize("batched", [0, 1])
def test_vmap_over_either_operand(batched: int) -> None:
    operands = [randn(2, 8), randn(4, 8)]
    operands[batched] = torch.stack([operands[batched]] * 3)
    dims = (0, None) if batched == 0 else (None, 0)
    found = torch.vmap(astrai_core.linear, dims)(*operands)
    assert torch.equal(found, torch.vmap(F.linear, dims)(*operands))
    why = passed_over(lambda: torch.vmap(astrai_core.linear, dims)(*operands))
    assert why == "functorch transforms the call"


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_records_the_call_instead_of_its_result(tracing: str) -> None:
    trace = make_fx(two_operands, tracing_mode=tracing)
    graph = trace(randn(2, 8), randn(4, 8))
    x, weight = randn(2, 8), randn(4, 8)
    assert torch.equal(graph(x, weight), F.linear(x, weight))


def test_jit_trace_records_the_call_instead_of_its_result() -> None:
    traced = torch.jit.trace(two_operands, (randn(2, 8), randn(4, 8)), check_trace=False)
    x, weight = randn(2, 8), randn(4, 8)
    assert torch.equal(traced(x, weight), F.linear(x, weight))


def test_forward_mode_keeps_its_tangent() -> None:
    x, weight = randn(2, 8), randn(4, 8)
    tangent = torch.ones_like(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        result = forward_ad.unpack_dual(astrai_core.linear(dual, weight))
        why = passed_over(lambda: astrai_core.linear(dual, weight))
    assert why == "forward-mode differentiation is active"
    assert torch.equal(result.tangent, F.linear(tangent, weight))


def test_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        x, weight = mode.from_tensor(randn(2, 8)), mode.from_tensor(randn(4, 8))
    assert passed_over(lambda: astrai_core.linear(x, weight)) == "FakeTensor is no plain tensor"


def test_a_dispatch_mode_sees_plain_tensors_too() -> None:
    x, weight = randn(2, 8), randn(4, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert passed_over(lambda: astrai_core.linear(x, weight)) == (
            "a TorchDispatchMode is active"
        )


def test_subclasses() -> None:
    class Subclass(torch.Tensor):
        pass

    why = passed_over(lambda: astrai_core.linear(randn(2, 8).as_subclass(Subclass), randn(4, 8)))
    assert why == "Subclass is no plain tensor"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_operands_without_strides() -> None:
    nested, x, weight = torch.nested.nested_tensor([randn(2, 8)] * 2), randn(2, 8), randn(4, 8)
    for operands in ((nested, weight), (x, weight.to_sparse()), (x.to_sparse(), weight)):
        assert passed_over(lambda: astrai_core.linear(*operands)) == (  # noqa: B023
            "an operand is sparse or nested"
        )


def test_prompts_of_all_lengths_share_one_decision() -> None:
    policy.forget()
    weight = torch.ones(4, 8)
    for length in range(9, 40):
        astrai_core.linear(torch.ones(length, 8), weight)
    assert policy._decide.cache_info().currsize == 1
