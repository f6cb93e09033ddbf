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


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_sdpa_in_float64(is_causal, dims):
    q, k, v = bf16(2, 5, 6, 16), bf16(2, 9, 2, 16), bf16(2, 9, 2, 16) * 2
    shape = {2: (2, 9), 3: (2, 5, 9), 4: (2, 1, 5, 9)}[dims]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(dims)) < 0.7
    mask[..., :3] = True
    seen = (mask[:, None, None] if dims == 2 else mask.view(2, 1, 5, 9)).expand(2, 1, 5, 9)
    if is_causal:
        seen = seen & torch.ones(5, 9, dtype=torch.bool).tril(4)
    out, lse = reference.attention(q, k, v, mask=mask, is_causal=is_causal, scale=0.4)
    expected = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)),
        attn_mask=seen,
        scale=0.4,
        enable_gqa=True,
    ).transpose(1, 2)
    assert out.dtype == lse.dtype == torch.float64
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    scores = q.double().transpose(1, 2) @ k.double().repeat_interleave(3, 2).transpose(1, 2).mT
    total = torch.where(seen, (0.4 * scores).exp(), 0).sum(-1)
    assert torch.allclose(lse, total.log(), rtol=0, atol=1e-12)


def test_attention_past_a_length_is_attention_without():
    q, k, v = bf16(3, 4, 2, 16), bf16(3, 8, 1, 16), bf16(3, 8, 1, 16) * 2
    lengths = torch.tensor([8, 5, 0])
    for index, length in enumerate(lengths):
        k[index, length:], v[index, length:] = torch.nan, torch.nan
    out, lse = reference.attention(q, k, v, is_causal=True, kv_lens=lengths)
    short, short_lse = reference.attention(q[1:2], k[1:2, :5], v[1:2, :5], is_causal=True)
    assert torch.allclose(out[1:2], short) and torch.allclose(lse[1:2], short_lse)
    assert not out[2].any() and (lse[2] == -torch.inf).all()


def test_attention_of_queries_that_see_nothing():
    q, k = bf16(1, 4, 1, 16), bf16(1, 2, 1, 16)
    out, lse = reference.attention(q, k, k, is_causal=True)
    assert not out[:, :2].any() and (lse[..., :2] == -torch.inf).all()
    assert torch.equal(out[:, 2], k[:, 0].double()) and out.isfinite().all()
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    out, lse = reference.attention(q, k, k, mask=nothing)
    assert not out.any() and (lse == -torch.inf).all()
    out, lse = reference.attention(q, k[:, :0], k[:, :0])
    assert not out.any() and (lse == -torch.inf).all()
