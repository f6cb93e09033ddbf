# SPDX-License-Identifier: Apache-2.0
"""The ops on a CPU equal torch's, and hand the kernel what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import astrai_core
from astrai_core import policy
from astrai_core.ops import _select
from conftest import Site

BF16 = torch.bfloat16
SHAPES = [(64,), (1, 64), (3, 64), (2, 5, 64), (0, 64), (2, 0, 64)]


def unfused(x: Tensor, up: Tensor, gate: Tensor) -> Tensor:
    return F.linear(x, up) * F.silu(F.linear(x, gate))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_parity_with_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w, g = (torch.randn(s, dtype=dtype) for s in (shape, (32, 64), (32, 64)))
    b = torch.randn(32, dtype=dtype)
    assert torch.equal(astrai_core.linear(x, w), F.linear(x, w))
    assert torch.equal(astrai_core.linear(x, w, b), F.linear(x, w, b))
    assert torch.equal(astrai_core.swiglu(x, w, g), unfused(x, w, g))


def test_gradients_are_torchs() -> None:
    leaves = [torch.randn(s, requires_grad=True) for s in ((3, 64), (32, 64), (32, 64))]
    ours = torch.autograd.grad(astrai_core.swiglu(*leaves).square().sum(), leaves)
    theirs = torch.autograd.grad(unfused(*leaves).square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_functorch_and_autocast() -> None:
    x, w = torch.randn(4, 3, 64), torch.randn(32, 64)
    assert torch.equal(torch.vmap(lambda t: astrai_core.linear(t, w))(x), F.linear(x, w))
    with torch.autocast("cpu", BF16):
        assert torch.equal(astrai_core.linear(x, w), F.linear(x, w))


@pytest.mark.parametrize(
    "operands", [((2, 64), (32, 63)), ((), (32, 64)), ((2, 64), (2, 3, 64)), ((2, 8), (64,))]
)
def test_operands_that_do_not_fit_are_torchs_to_refuse(operands: Any) -> None:
    x, w = (torch.ones(s, dtype=BF16) for s in operands)
    try:
        expected: Tensor | None = F.linear(x, w)
    except (RuntimeError, IndexError):
        expected = None
    if expected is None:
        with pytest.raises((RuntimeError, IndexError)):
            astrai_core.linear(x, w)
    else:
        assert torch.equal(astrai_core.linear(x, w), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_fullgraph() -> None:
    x, w, g = (torch.randn(s, dtype=BF16) for s in ((2, 3, 64), (32, 64), (32, 64)))

    def mlp(x: Tensor) -> Tensor:
        return astrai_core.swiglu(x, w, g) + astrai_core.linear(x, w)

    with torch.no_grad():
        assert torch.equal(torch.compile(mlp, fullgraph=True, backend="eager")(x), mlp(x))


@pytest.mark.parametrize("shape", [(64,), (2, 64), (2, 2, 64)])
def test_the_kernel_gets_tokens_and_the_caller_its_shape(
    shape: tuple[int, ...],
    site: Site,
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stand-in adds 100; a tensor of the CPU is taken for one of the GPU."""
    site.add()
    gpus((9, 0))
    real = policy.describe
    monkeypatch.setattr(_select, "describe", lambda *args: real(*args)._replace(gpu=0))
    x, w = torch.randn(shape, dtype=BF16), torch.randn(32, 64, dtype=BF16)
    with astrai_core.explain() as report:
        y = astrai_core.linear(x, w)
    assert torch.equal(y, F.linear(x, w) + 100)
    assert site.native_of("standin_gemv").calls == [shape if len(shape) < 3 else (4, 64)]
    (row,) = report.rows
    assert (row.chosen, row.passed_over) == (
        "gemv",
        {"torch": "the measured table prefers the kernel"},
    )
