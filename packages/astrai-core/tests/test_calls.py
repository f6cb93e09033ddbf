# SPDX-License-Identifier: Apache-2.0
"""Calls of the ops from operands to kernel: what a stand-in for it gets, and when torch runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import astrai_core
from astrai_core import use
from astrai_core.ops import _traced
from conftest import EXTENSION, Site

BF16 = torch.bfloat16
Gpus = Callable[..., None]


@pytest.fixture
def kernels(site: Site, seen_as_gpu: None) -> Any:  # noqa: ARG001
    """A usable family, and CPU tensors that seem to be on its GPU; its native module."""
    package = site.add()
    return site.native_of(package)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=BF16)


def test_forced_ops_fall_back_to_torch_bitwise(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    monkeypatch.setenv("ASTRAI_SWIGLU", "1")
    w = torch.randn(32, 64, dtype=BF16)
    for x, weight in (
        (torch.randn(9, 64, dtype=BF16), w),
        (torch.randn(0, 64, dtype=BF16), w),
        (torch.randn(2, 64), w.float()),
        (torch.randn(64, 2, dtype=BF16).t(), w),
        (torch.randn(2, 64, dtype=BF16), w.clone().requires_grad_()),
        (torch.randn(2, 64, dtype=BF16), w.t().contiguous().t()),
    ):
        assert torch.equal(astrai_core.linear(x, weight), F.linear(x, weight))
        expected = F.linear(x, weight) * F.silu(F.linear(x, weight))
        assert torch.equal(astrai_core.swiglu(x, weight, weight), expected)
    assert kernels.calls == []
    x, w = ones(2, 60), ones(4, 60)  # swiglu's kernel needs K % 8 == 0; the linears in it do not
    with astrai_core.explain() as report:
        astrai_core.swiglu(x, w, w)
    assert [row.chosen for row in report.rows if row.op == "swiglu"] == ["torch"]


def test_swiglu_hands_the_kernel_tokens(kernels: Any) -> None:
    x, w = torch.randn(2, 2, 64, dtype=BF16), torch.randn(32, 64, dtype=BF16)
    with use(swiglu="gemv"), astrai_core.explain() as report:
        y = astrai_core.swiglu(x, w, w)
    assert kernels.calls == [(4, 64)]
    assert torch.equal(y, F.linear(x, w) * F.silu(F.linear(x, w)) + 100)
    (row,) = report.rows
    assert (row.op, row.chosen) == ("swiglu", "gemv")
    assert row.passed_over == {"torch": "use() demands gemv"}


@pytest.mark.parametrize("op", ["linear", "swiglu"])
def test_a_demand_raises_from_the_op_itself(op: str) -> None:
    operands = [ones(2, 64), ones(4, 64), ones(4, 64)][: 2 if op == "linear" else 3]
    with use(**{op: "gemv"}), pytest.raises(RuntimeError, match=f"^{op}: gemv is demanded by use"):
        getattr(astrai_core, op)(*operands)


@pytest.mark.usefixtures("kernels")
def test_a_demand_outranks_the_table() -> None:
    x, w = ones(8, 8200), ones(16, 8200)  # outside sm_90's bands

    def chosen() -> list[str | None]:
        with torch.no_grad(), astrai_core.explain() as report:
            astrai_core.swiglu(x, w, w)
        return [row.chosen for row in report.rows if row.op == "swiglu"]

    assert chosen() == ["torch"]
    with use(swiglu="gemv"):
        assert chosen() == ["gemv"]


@pytest.mark.usefixtures("seen_as_gpu")
def test_a_native_module_that_breaks_at_the_first_call_leaves_torch(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add(native={EXTENSION: "text"})
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    with astrai_core.explain() as report:
        assert torch.equal(astrai_core.linear(ones(2, 8), ones(4, 8)), ones(2, 4) * 8)
    (row,) = report.rows
    assert row.chosen == "torch" and "importing standin_gemv failed" in row.passed_over["gemv"]


@pytest.mark.parametrize(
    ("of_cuda", "why"),
    [
        ("none", "x is not on a CUDA device"),
        ("x", "operands on different devices"),
        ("weight", "operands on different devices"),
    ],
)
def test_device_0_of_another_accelerator(
    kernels: Any, of_cuda: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An XPU numbers its devices from 0 too; get_device() is 0 for all of these tensors."""
    x, weight = ones(2, 8), ones(4, 8)
    on_cuda = {"x": x, "weight": weight}.get(of_cuda)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor is on_cuda))
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    with astrai_core.explain() as report:
        astrai_core.linear(x, weight)
    assert report.rows[0].passed_over == {"gemv": why}
    assert kernels.calls == []


@pytest.mark.parametrize("grad", [True, False])
def test_a_trace_names_the_namespace_of_the_kernel(kernels: Any, grad: bool) -> None:
    assert kernels
    weight = ones(4, 8).requires_grad_(grad)
    call = _traced._describe("linear", ones(2, 8), (weight,), None)
    assert call is not None and call[1:5] == (-1, 2, 4, 8)
    assert (call[5] is not None) is grad
    on_gpu = (call[0], 0, *call[2:])
    assert _traced._namespace(on_gpu) == ("" if grad else "standin_gemv")


def test_functorch_gradients_are_torchs() -> None:
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    ours = torch.func.grad(lambda t: astrai_core.swiglu(t, w, w).sum())(x)
    assert torch.equal(
        ours, torch.func.grad(lambda t: (F.linear(t, w) * F.silu(F.linear(t, w))).sum())(x)
    )


def test_functorch_hides_the_call_from_the_kernel(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    x, w = ones(3, 2, 8), ones(4, 8)
    y = torch.func.vmap(lambda t: astrai_core.linear(t, w))(x)
    assert torch.equal(y, ones(3, 2, 4) * 8) and kernels.calls == []
