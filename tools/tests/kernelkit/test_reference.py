# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

from kernelkit import reference


def bf16(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


def test_linear_is_exact_in_float64():
    x, w, b = bf16(3, 40), bf16(5, 40), bf16(5)
    y = reference.linear(x, w, b)
    assert y.dtype == torch.float64
    assert torch.equal(y, F.linear(x.double(), w.double(), b.double()))
    assert reference.linear(x[0], w).shape == (5,)


def test_swiglu_rounds_where_the_unfused_computation_does():
    x, up, gate = bf16(4, 64), bf16(24, 64), bf16(24, 64)
    unfused = F.linear(x, up) * F.silu(F.linear(x, gate))
    rounded = reference.swiglu_bf16(x, up, gate)
    assert torch.equal(rounded, rounded.bfloat16().double())
    exact = reference.swiglu(x, up, gate)
    assert (unfused.double() - rounded).square().mean() < (unfused.double() - exact).square().mean()


def test_add_rms_norm_is_what_llama_computes():
    x, residual, weight = bf16(4, 128), bf16(4, 128), bf16(128)
    y, h = reference.add_rms_norm(x, residual, weight, 1e-5)
    total = x + residual
    normed = total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(h, total.double())
    # The statistic is a sum in fp32 there: a last bit may differ.
    assert torch.allclose(y, (weight * normed.bfloat16()).double(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("table", [(3, 8), (2, 3, 8)], ids=["shared", "batched"])
def test_rotary_is_the_complex_product_and_the_half_split_of_llama(table):
    x = bf16(2, 3, 5, 16)
    angle = torch.randn(table, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    product = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * torch.complex(
        cos, sin
    ).unsqueeze(-2)
    y = reference.rotary(x, cos, sin, interleaved=True)
    assert torch.allclose(y, torch.view_as_real(product).flatten(-2), rtol=0, atol=1e-14)

    low, high = x.double().chunk(2, -1)
    cos2, sin2 = (torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin))
    expected = x.double() * cos2 + torch.cat((-high, low), -1) * sin2
    assert torch.equal(reference.rotary(x, cos, sin, interleaved=False), expected)
    # The two pairings are one rotation of permuted heads.
    permuted = torch.stack((low, high), -1).flatten(-2)
    y = reference.rotary(permuted, cos, sin, interleaved=True)
    assert torch.equal(y.unflatten(-1, (-1, 2)).mT.flatten(-2), expected)
