# SPDX-License-Identifier: Apache-2.0
"""rotary_emb on a GPU: values against float64, in hostile memory."""

from __future__ import annotations

import pytest
import torch
from operands import angles, randn
from torch import Tensor

from astrai_attention import _attention, rotary_emb
from kernelkit import reference
from kernelkit.compare import assert_close_to_reference
from kernelkit.poison import guarded_output, misaligned, poison_

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

BF16 = torch.bfloat16
SMALL = pytest.mark.sanitize
PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def torch_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The unfused computation in fp32: the complex product, or `rotate_half` of Llama."""
    if interleaved:
        turn = torch.complex(cos, sin).unsqueeze(-2)
        product = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn
        return torch.view_as_real(product).flatten(-2).to(x.dtype)
    low, high = x.float().chunk(2, -1)
    cos, sin = (torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin))
    return (x * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


def check_values(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    # On the CPU if small: torch's own kernels are not all clean under the sanitizer.
    if x.numel() <= 8_000_000:
        out, x, cos, sin = out.cpu(), x.cpu(), cos.cpu(), sin.cpu()
    exact = reference.rotary(x, cos, sin, interleaved=interleaved)
    assert_close_to_reference(
        out, exact, torch_rotary(x.contiguous(), cos, sin, interleaved=interleaved)
    )


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    out = guarded_output(x.shape, device="cuda")
    returned = rotary_emb(x, cos, sin, interleaved=interleaved, out=out.tensor)
    assert returned is out.tensor
    out.check()
    check_values(out.tensor, x, cos, sin, interleaved)


def heads_per_thread(tokens: int, heads: int, head_dim: int, interleaved: bool) -> int:
    device = _attention.device_info(0)
    plan = _attention.plan_rotary(
        tokens=tokens, heads=heads, head_dim=head_dim, interleaved=interleaved, device=device
    )
    return int(plan["heads_per_thread"])


@PAIRINGS
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 336, 512])
@pytest.mark.parametrize(("batch", "seq", "heads"), [(1, 1, 32), (16, 1, 8), (3, 70, 5)])
def test_rotary(batch: int, seq: int, heads: int, head_dim: int, interleaved: bool) -> None:
    x = randn(batch, seq, heads, head_dim)
    check_rotary(x, *angles(seq, head_dim // 2), interleaved)
    check_rotary(x, *angles(batch, seq, head_dim // 2), interleaved)
    check_rotary(x.flatten(0, 1), *angles(batch * seq, head_dim // 2), interleaved)


@PAIRINGS
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 32, 33])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rotary_of_a_prompt(heads: int, head_dim: int, interleaved: bool) -> None:
    """Enough tokens for several heads a thread, and tails of tokens and heads."""
    seq = 4_000_003 // (heads * head_dim) * 4 + 1
    x = randn(1, seq, heads, head_dim)
    assert heads_per_thread(seq, heads, head_dim, interleaved) == {1: 1, 2: 2, 3: 2}.get(heads, 4)
    check_rotary(x, *angles(seq, head_dim // 2), interleaved)


@SMALL
@PAIRINGS
@pytest.mark.parametrize(
    ("batch", "seq", "heads", "head_dim"),
    [(1, 1, 32, 128), (2, 3, 5, 48), (3, 1, 1, 512), (1, 67, 3, 16), (2, 2, 130, 32)],
)
def test_rotary_small(batch: int, seq: int, heads: int, head_dim: int, interleaved: bool) -> None:
    x = randn(batch, seq, heads, head_dim)
    check_rotary(x, *angles(seq, head_dim // 2), interleaved)
    check_rotary(x, *angles(batch, seq, head_dim // 2), interleaved)


@SMALL
@PAIRINGS
def test_rotary_small_with_several_heads_a_thread(interleaved: bool) -> None:
    """Short rows: what fills a GPU is then small enough for the sanitizer."""
    tokens = 512 * _attention.device_info(0).sm_count + 1
    assert heads_per_thread(tokens, 7, 16, interleaved) == 4
    x, (cos, sin) = randn(tokens, 7, 16), angles(tokens, 8)
    check_rotary(x, cos, sin, interleaved)


@SMALL
@PAIRINGS
@pytest.mark.parametrize("part", ["q", "k"])
def test_a_slice_of_a_fused_projection(part: str, interleaved: bool) -> None:
    """Strided x, out and angles, NaN between and around their rows; in place nothing else moves."""
    heads = slice(0, 6) if part == "q" else slice(6, 8)
    count = heads.stop - heads.start
    fused = poison_(torch.empty(2, 9, 10, 64, device="cuda", dtype=BF16))
    fused[:, :, heads] = randn(2, 9, count, 64)
    cos, sin = (misaligned(t, 4, row_padding=8) for t in angles(2, 9, 32))
    x = fused[:, :, heads]
    before = fused.clone()
    check_rotary(x, cos, sin, interleaved)

    apart = poison_(torch.empty(2, 9, 10, 64, device="cuda", dtype=BF16))
    rotary_emb(x, cos, sin, interleaved=interleaved, out=apart[:, :, heads])
    assert rotary_emb(x, cos, sin, interleaved=interleaved, out=x) is x
    expected = rotary_emb(before[:, :, heads], cos, sin, interleaved=interleaved)
    for written, around in ((fused, before), (apart, poison_(apart.clone()))):
        assert torch.equal(written[:, :, heads], expected)
        around[:, :, heads] = expected
        assert torch.equal(written.view(torch.int16), around.view(torch.int16))


@SMALL
@PAIRINGS
def test_any_order_of_the_leading_dimensions(interleaved: bool) -> None:
    """[batch, heads, seq, head_dim] memory seen as blhd, and expanded inputs."""
    cos, sin = angles(6, 32)
    x = randn(2, 3, 6, 64).transpose(1, 2)
    check_rotary(x, cos, sin, interleaved)
    out = randn(2, 3, 6, 64).transpose(1, 2)
    rotary_emb(x, cos, sin, interleaved=interleaved, out=out)
    assert torch.equal(out, rotary_emb(x, cos, sin, interleaved=interleaved))
    one = randn(1, 6, 1, 64)
    check_rotary(one.expand(2, 6, 3, 64), cos, sin, interleaved)
    check_rotary(x, cos.expand(2, 6, 32), sin.expand(2, 6, 32), interleaved)
    check_rotary(x, cos[:1].expand(6, 32), sin[:1].expand(6, 32), interleaved)


@PAIRINGS
@pytest.mark.parametrize("tokens", [1, 300, 20_000])
def test_in_place(tokens: int, interleaved: bool) -> None:
    x, (cos, sin) = randn(tokens, 9, 128), angles(tokens, 64)
    expected = rotary_emb(x, cos, sin, interleaved=interleaved)
    assert rotary_emb(x, cos, sin, interleaved=interleaved, out=x) is x
    assert torch.equal(x, expected)


@PAIRINGS
def test_offsets_beyond_32_bits(interleaved: bool) -> None:
    """Rows 4 GiB apart in one allocation, of which three are touched."""
    memory = torch.empty(2 * 2**31 + 256, device="cuda", dtype=BF16)
    x = memory.as_strided((3, 1, 2, 128), (2**31, 256, 128, 1))
    x.copy_(randn(3, 1, 2, 128))
    cos, sin = angles(3, 1, 64)
    check_rotary(x, cos, sin, interleaved)
    expected = rotary_emb(x, cos, sin, interleaved=interleaved)
    assert torch.equal(rotary_emb(x, cos, sin, interleaved=interleaved, out=x), expected)


@PAIRINGS
def test_nan_and_infinity_stay_in_their_pair(interleaved: bool) -> None:
    x, (cos, sin) = randn(1, 4, 3, 64), angles(4, 32)
    clean = rotary_emb(x, cos, sin, interleaved=interleaved)
    x[0, 1, 2, 10] = torch.nan
    x[0, 2, 0, 33] = torch.inf
    out = rotary_emb(x, cos, sin, interleaved=interleaved)
    check_values(out, x, cos, sin, interleaved)
    changed = (out != clean).nonzero().tolist()
    pairs = [[10, 11], [32, 33]] if interleaved else [[10, 42], [1, 33]]
    assert changed == [[0, 1, 2, i] for i in pairs[0]] + [[0, 2, 0, i] for i in pairs[1]]


def test_the_identity_and_a_quarter_turn_are_exact() -> None:
    x = randn(7, 2, 32)
    one, zero = torch.ones(7, 16, device="cuda"), torch.zeros(7, 16, device="cuda")
    for interleaved in (False, True):
        assert torch.equal(rotary_emb(x, one, zero, interleaved=interleaved), x)
    low, high = x.chunk(2, -1)
    turned = rotary_emb(x, zero, one, interleaved=False)
    assert torch.equal(turned, torch.cat((-high, low), -1))
    turned = rotary_emb(x, zero, one, interleaved=True)
    assert torch.equal(turned, torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2))


@pytest.mark.parametrize("shape", [(0, 5, 3, 32), (2, 0, 3, 32), (2, 5, 0, 32), (0, 3, 32)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, (cos, sin) = randn(*shape), angles(shape[-3], 16)
    out = rotary_emb(x, cos, sin, interleaved=True)
    assert out.shape == x.shape and out.dtype == BF16 and out.is_cuda
    assert rotary_emb(x, cos, sin, interleaved=True, out=x) is x
