# SPDX-License-Identifier: Apache-2.0
"""attn_decode on a GPU: values against float64, in hostile memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_operands import BF16, check_values, same_bits
from operands import randn
from torch import Tensor

from astrai_attention import _attention, attn_decode
from kernelkit.poison import guarded_output, misaligned, poison_

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

SMALL = pytest.mark.sanitize
HEAD_DIMS = pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
# Of q, and of k and v.
HEADS = pytest.mark.parametrize(
    "heads", [(3, 3), (6, 2), (8, 2), (8, 1), (18, 2), (16, 1)], ids=lambda h: f"{h[0]}-{h[1]}"
)


def check_decode(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Poisoned output between guards, with the log-sum-exp; and the same without either."""
    guarded = guarded_output(q.shape, device="cuda")
    out, lse = attn_decode(q, k, v, **options, return_lse=True, out=guarded.tensor)
    assert out is guarded.tensor
    guarded.check()
    mask = options.get("mask")
    keep = None if mask is None else mask.reshape(q.shape[0], k.shape[1])
    check_values((out, lse), q, k, v, keep, options.get("scale"))
    assert torch.equal(attn_decode(q, k, v, **options), out)
    return out, lse


def plan(q: Tensor, k: Tensor) -> dict[str, Any]:
    return _attention.plan_decode(
        batch=q.shape[0],
        q_heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        max_length=k.shape[1],
        is_exact=True,
        device=_attention.device_info(0),
    )


def operands(
    batch: int, length: int, heads: tuple[int, int], head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    kv = (batch, length, heads[1], head_dim)
    return randn(batch, 1, heads[0], head_dim), randn(*kv), randn(*kv)


@HEAD_DIMS
@HEADS
@pytest.mark.parametrize(
    "lengths",
    [
        (1, 2, 15, 16, 17, 31, 32, 33),
        (63, 127, 128, 129, 255, 257),
        (500, 1000, 1023, 2047, 2048),
        (2049, 3333, 4096, 5000),
    ],
    ids=lambda lengths: f"{lengths[0]}-{lengths[-1]}",
)
def test_lengths(lengths: tuple[int, ...], heads: tuple[int, int], head_dim: int) -> None:
    for length in lengths:
        check_decode(*operands(2, length, heads, head_dim))


@HEAD_DIMS
@pytest.mark.parametrize("batch", [1, 3, 17, 33, 40])
def test_batches(batch: int, head_dim: int) -> None:
    """Up to more units than two for every SM."""
    for length in (1, 129, 700):
        check_decode(*operands(batch, length, (32, 8), head_dim))


@HEAD_DIMS
def test_every_way_to_share_out_the_tokens(head_dim: int) -> None:
    """One CTA, clusters of 2, 4 and 8, and splits that the last or a second kernel merges."""
    found = set()
    for heads, length in (
        ((4, 1), 60),
        ((4, 1), 520),
        ((8, 2), 1000),
        ((4, 1), 2048),
        ((4, 1), 3500),
        ((8, 8), 3500),
        ((8, 1), 20_000),
    ):
        q, k, v = operands(1, length, heads, head_dim)
        check_decode(q, k, v)
        found.add((plan(q, k)["parts"] > 1, plan(q, k)["splits"] > 1, plan(q, k)["merges_inside"]))
    clusters = _attention.device_info(0).image_arch >= 90
    expected = {(False, True, True), (False, True, False)}
    if clusters:
        expected |= {(False, False, False), (True, False, False)}
    assert found >= expected


@SMALL
@HEAD_DIMS
@pytest.mark.parametrize("length", [0, 1, 40, 300, 3100])
def test_small(length: int, head_dim: int) -> None:
    check_decode(*operands(1, length, (9, 1), head_dim))


@SMALL
@pytest.mark.parametrize("length", [50, 600, 3100])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_masks(rank: int, length: int) -> None:
    """Some keys, every second one, the first, the last, none, all."""
    q, k, v = operands(6, length, (6, 2), 64)
    keep = torch.zeros(6, length, dtype=torch.bool)
    keep[0] = torch.rand(length) < 0.5
    keep[1, ::2] = True
    keep[2, 0] = True
    keep[3, -1] = True
    keep[5] = True
    mask = keep.cuda().view(6, *[1] * (rank - 2), length)
    out, lse = check_decode(q, k, v, mask=mask)
    unmasked = attn_decode(q, k, v).cpu()
    out, lse, v = out.cpu(), lse.cpu(), v.cpu()
    assert not out[4].any() and (lse[4] == -torch.inf).all()
    # One key: its V.
    group = torch.arange(6) // 3
    assert torch.equal(out[2, 0], v[2, 0, group])
    assert torch.equal(out[3, 0], v[3, -1, group])
    assert torch.equal(out[5], unmasked[5])


def test_layouts_of_a_mask() -> None:
    q, k, v = operands(3, 700, (8, 2), 128)
    wide = torch.rand(3, 1400, device="cuda") < 0.3
    check_decode(q, k, v, mask=wide[:, ::2])
    check_decode(q, k, v, mask=wide[:1, 700:].expand(3, 700))
    check_decode(q, k, v, mask=wide.view(1400, 3).mT[:, :700])


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("share", [0.002, 0.5])
def test_masks_over_splits(share: float, head_dim: int) -> None:
    """Whole tiles, warps and CTAs without any key."""
    q, k, v = operands(2, 5000, (8, 2), head_dim)
    check_decode(q, k, v, mask=torch.rand(2, 5000, device="cuda") < share)
    few = torch.zeros(2, 5000, dtype=torch.bool, device="cuda")
    few[0, 4999] = True
    check_decode(q, k, v, mask=few)


@SMALL
@pytest.mark.parametrize("length", [90, 3100])
def test_slices_of_fused_projections(length: int) -> None:
    """NaN in the heads around; the output into a slice, around which nothing moves."""
    fused = poison_(torch.empty(2, length, 8, 64, dtype=BF16))
    fused[:, :, 1:3] = torch.randn(2, length, 2, 64).to(BF16)
    fused[:, :, 5:7] = torch.randn(2, length, 2, 64).to(BF16)
    queries = poison_(torch.empty(2, 1, 10, 64, dtype=BF16))
    queries[:, :, 2:8] = torch.randn(2, 1, 6, 64).to(BF16)
    fused, queries = fused.cuda(), queries.cuda()
    q, k, v = queries[:, :, 2:8], fused[:, :, 1:3], fused[:, :, 5:7]
    out, _ = check_decode(q, k, v)
    apart = queries.clone()
    assert attn_decode(q, k, v, out=apart[:, :, 2:8]).data_ptr() == apart[:, :, 2:8].data_ptr()
    expected = queries.clone()
    expected[:, :, 2:8] = out
    assert same_bits(apart, expected)


@pytest.mark.parametrize("length", [90, 1500, 3100])
def test_any_order_of_the_leading_dimensions(length: int) -> None:
    q = randn(3, 6, 1, 64).transpose(1, 2)
    k, v = (randn(3, 2, length, 64).transpose(1, 2) for _ in range(2))
    out, _ = check_decode(q, k, v)
    assert torch.equal(out, attn_decode(q.contiguous(), k.contiguous(), v.contiguous()))
    k, v = (randn(length, 3, 2, 64).transpose(0, 1) for _ in range(2))
    check_decode(q, k, v)
    k, v = (randn(1, length, 1, 64).expand(3, length, 2, 64) for _ in range(2))
    check_decode(q, k, v)
    every_third = randn(3, 3 * length, 2, 64)[:, ::3]
    check_decode(q, every_third, every_third)


@SMALL
def test_rows_on_16_bytes_in_the_midst_of_nan() -> None:
    q, k, v = operands(2, 77, (6, 2), 64)
    check_decode(*(misaligned(x, 8, row_padding=8) for x in (q, k, v)))


@pytest.mark.parametrize("length", [3, 300, 3100])
@pytest.mark.parametrize("scale", [1e-3, 0.5, 1, 4.0])
def test_scales(scale: float, length: int) -> None:
    check_decode(*operands(2, length, (8, 2), 64), scale=scale)


@pytest.mark.parametrize("length", [40, 3100])
def test_scores_far_from_zero(length: int) -> None:
    """Beyond the range of exp without a maximum, in both directions; and the largest one late."""
    q, k, v = operands(2, length, (8, 2), 128)
    for shift in (400.0, -400.0):
        ones = torch.ones_like(q)
        check_decode(ones, torch.full_like(k, shift / 16) + randn(*k.shape) * 0.1, v)
    k = (k.float() * torch.linspace(0, 3, length, device="cuda").view(-1, 1, 1)).to(BF16)
    check_decode(q, k, v)
    check_decode(q, k.flip(1).contiguous(), v)


def test_is_causal_changes_nothing() -> None:
    q, k, v = operands(2, 300, (8, 2), 128)
    assert torch.equal(attn_decode(q, k, v, is_causal=True), attn_decode(q, k, v))


@pytest.mark.parametrize("length", [100, 2000, 4000])
def test_nan_and_infinity_stay_in_their_head(length: int) -> None:
    q, k, v = operands(2, length, (8, 2), 64)
    clean = attn_decode(q, k, v)
    v[1, length // 2, 1, 9] = torch.nan
    v[0, length - 1, 0, 33] = torch.inf
    out = attn_decode(q, k, v)
    assert out[1, 0, 4:, 9].isnan().all() and (out[0, 0, :4, 33] == torch.inf).all()
    assert int((out != clean).sum()) == 8
    q[0, 0, 5, 3] = torch.nan
    found = attn_decode(q, k, v).isnan() & ~out.isnan()
    assert found[0, 0, 5].all() and int(found.sum()) == 64


@SMALL
@pytest.mark.parametrize("length", [100, 2000, 4000])
def test_nan_scores_give_nan_in_output_and_lse(length: int) -> None:
    """Of all keys and of one; a row without any key is not one of those."""
    q, k, v = operands(3, length, (8, 2), 64)
    mask = torch.ones(3, length, dtype=torch.bool, device="cuda")
    mask[2] = False
    clean, clean_lse = attn_decode(q, k, v, mask, return_lse=True)
    q[0, 0, 5, 3] = torch.nan
    k[1, length - 1, 1, 9] = torch.nan
    v[2] = torch.nan
    out, lse = attn_decode(q, k, v, mask, return_lse=True)
    wrong = torch.zeros(3, 8, dtype=torch.bool)
    wrong[0, 5] = True
    wrong[1, 4:] = True
    wrong = wrong.cuda()
    assert out[:, 0][wrong].isnan().all() and lse[..., 0][wrong].isnan().all()
    assert torch.equal(out[:, 0][~wrong], clean[:, 0][~wrong])
    assert torch.equal(lse[..., 0][~wrong], clean_lse[..., 0][~wrong])
    assert not out[2].any() and (lse[2] == -torch.inf).all()


def test_offsets_beyond_32_bits() -> None:
    """Sequences 4 GiB apart in one allocation, and tokens 64 MiB apart."""
    memory = torch.empty(2 * 2**31 + 2**20, device="cuda", dtype=BF16)
    for shape, strides in (
        ((3, 70, 2, 128), (2**31, 256, 128, 1)),
        ((1, 128, 2, 128), (2**20, 2**25, 128, 1)),
    ):
        k = memory.as_strided(shape, strides)
        v = memory.as_strided(shape, strides, 2**16)
        q = randn(shape[0], 1, 8, 128)
        k.copy_(randn(*shape))
        v.copy_(randn(*shape))
        out = attn_decode(q, k, v)
        assert torch.equal(out, attn_decode(q, k.contiguous(), v.contiguous()))


@SMALL
def test_no_tokens_and_no_sequences() -> None:
    q, k, v = operands(2, 0, (6, 2), 64)
    out, lse = attn_decode(q, k, v, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    q, k, v = operands(0, 5, (6, 2), 64)
    out, lse = attn_decode(q, k, v, return_lse=True)
    assert out.shape == (0, 1, 6, 64) and lse.shape == (0, 6, 1) and out.is_cuda
    assert attn_decode(q, k, v, out=out) is out
