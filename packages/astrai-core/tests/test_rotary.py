# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: against rotations in float64, and when the kernel serves it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import astrai_core
from astrai_core import apply_rotary_emb
from conftest import Site, install_attention


def angles(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 7


def exact(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Every pair turned by a 2 by 2 matrix."""
    y = torch.empty(x.shape, dtype=torch.float64)
    half = x.shape[-1] // 2
    for i in range(half):
        at = [2 * i, 2 * i + 1] if interleaved else [i, i + half]
        cos, sin = angle[..., i].cos(), angle[..., i].sin()
        turn = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
        y[..., at] = torch.einsum("...lij,...lhj->...lhi", turn, x[..., at].double())
    return y


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos().float(), angle.sin().float()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("leading", [(), (1,), (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pairs_are_turned(interleaved: bool, leading: tuple[int, ...], dtype: torch.dtype) -> None:
    angle = angles(*leading, 5, 4)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64).to(dtype)
    y = apply_rotary_emb(x, cos_sin(angle), interleaved=interleaved)
    assert y.dtype == dtype and y.shape == x.shape
    expected = exact(x, angle, interleaved)
    # fp32 keeps 2^-24 of each product; a bf16 result is off by one rounding, 2^-8, and no more.
    error = (y.double() - expected).abs() - 1e-6 * x.double().abs().max()
    rounding = 2**-8 if dtype == torch.bfloat16 else 0
    assert (error <= rounding * expected.abs()).all()


def test_pairs_are_adjacent_by_default() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    quarter = torch.tensor([[math.pi / 2, 0.0]])
    y = apply_rotary_emb(x, cos_sin(quarter))
    torch.testing.assert_close(y.flatten(), torch.tensor([-2.0, 1.0, 3.0, 4.0]))
    y = apply_rotary_emb(x, cos_sin(quarter), interleaved=False)
    torch.testing.assert_close(y.flatten(), torch.tensor([-3.0, 2.0, 1.0, 4.0]))


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients(interleaved: bool) -> None:
    cos, sin = angles(3, 2).cos(), angles(3, 2).sin()
    x = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: apply_rotary_emb(x, (cos, sin), interleaved=interleaved), x
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_trace_holds_the_call(interleaved: bool) -> None:
    x, both = torch.randn(2, 3, 2, 4), cos_sin(angles(3, 2))
    compiled = torch.compile(apply_rotary_emb, fullgraph=True, backend="eager")
    found = compiled(x, both, interleaved=interleaved)
    assert torch.equal(found, apply_rotary_emb(x, both, interleaved=interleaved))


@pytest.fixture
def kernels(site: Site, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A usable family, and CPU tensors that seem to be on its GPU; its native module."""
    native = install_attention(site)
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    return native


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("leading", [(), (1,), (2,)])
def test_the_kernel_serves_bf16_without_gradients(
    kernels: Any, leading: tuple[int, ...], interleaved: bool
) -> None:
    x, angle = torch.randn(2, 3, 2, 16).bfloat16(), angles(*leading, 3, 8)
    with torch.no_grad(), astrai_core.explain() as report:
        y = apply_rotary_emb(x, cos_sin(angle), interleaved=interleaved)
    assert kernels.calls == ["rotary_emb"]
    torch.testing.assert_close(y.double(), exact(x, angle, interleaved), rtol=2**-8, atol=1e-6)
    (row,) = report.rows
    assert (row.op, row.chosen) == ("rotary_emb", "attention")
    assert row.passed_over == {"torch": "the kernel can serve the call"}


def off_16_bytes(x: Tensor) -> Tensor:
    """The same values, contiguous, from the second element of an allocation on."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, cos: (x.float(), cos), "x is not bfloat16"),
        (lambda x, cos: (x, cos.bfloat16()), "cos or sin is not float32"),
        (lambda x, cos: (x[..., :8], cos[:, :4]), "head_dim = 8"),
        (lambda x, cos: (x.mT.contiguous().mT, cos), "the rows of x are not contiguous"),
        (lambda x, cos: (x, cos.mT.contiguous().mT), "cos or sin is not contiguous"),
        (lambda x, cos: (x, off_16_bytes(cos)), "cos or sin is not contiguous, or does not start"),
        (
            lambda x, cos: (off_16_bytes(x), cos),
            "the rows of x are not contiguous, or do not start",
        ),
        (lambda x, cos: (x[:0], cos), "there is nothing to compute"),
    ],
)
def test_what_the_kernel_does_not_take(kernels: Any, change: Any, words: str) -> None:
    x, cos = change(torch.randn(2, 3, 2, 16).bfloat16(), angles(3, 8).cos().float())
    with torch.no_grad(), astrai_core.explain() as report:
        apply_rotary_emb(x, (cos, cos))
    assert report.rows[0].passed_over["attention"].startswith(words)
    assert report.rows[0].chosen == "torch" and kernels.calls == []


def test_the_kernel_is_not_for_gradients_nor_for_other_devices(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, both = torch.randn(2, 3, 2, 16).bfloat16(), cos_sin(angles(3, 8))
    with astrai_core.explain() as report:
        apply_rotary_emb(x, both)
        with torch.no_grad():
            monkeypatch.setattr(torch.Tensor, "get_device", lambda _: -1)
            apply_rotary_emb(x, both)
    assert [row.passed_over["attention"] for row in report.rows] == [
        "gradients are enabled, and the kernel has no backward",
        "the operands are not on one CUDA device",
    ]
    assert kernels.calls == []


def test_operands_that_do_not_fit() -> None:
    x, cos = torch.ones(2, 3, 2, 4), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"^x: expected \[batch, length, heads, head_dim\] with"):
        apply_rotary_emb(x[..., :3], (cos, cos))
    with pytest.raises(ValueError, match=r"^cos: expected \[3, 2\] or \[2, 3, 2\], got \[3, 4\]"):
        apply_rotary_emb(x, (torch.ones(3, 4), cos))
    with pytest.raises(ValueError, match=r"^sin: expected cos's shape \[3, 2\], got \[1, 3, 2\]"):
        apply_rotary_emb(x, (cos, cos[None]))
