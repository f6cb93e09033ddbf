# SPDX-License-Identifier: Apache-2.0
"""Prefill attention on a GPU: values against float64, in hostile memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from prefill_operands import (
    BF16,
    DEVICE,
    check_dense,
    check_paged,
    check_values,
    hostile,
    indices,
    paged,
    randn,
)
from torch import Tensor

from astrai_attention import attn_paged_prefill, attn_prefill

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

SMALL = pytest.mark.sanitize
HEAD_DIMS = pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
# (q_heads, kv_heads): groups of 1, 3, 4, 6 and 8 query heads.
HEADS = pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2), (6, 1), (8, 1)], ids=str)


def qkv(
    batch: int, q_len: int, kv_len: int, heads: tuple[int, int], head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """NaN around every row: past each length too."""
    q_heads, kv_heads = heads
    shapes = ((q_len, q_heads), (kv_len, kv_heads), (kv_len, kv_heads))
    q, k, v = (hostile(randn(batch, *shape, head_dim)) for shape in shapes)
    return q, k, v


@CAUSAL
@HEAD_DIMS
@HEADS
@pytest.mark.parametrize("q_len", [1, 2, 17, 63, 64, 65, 127, 129, 300])
def test_as_many_keys_as_queries(
    q_len: int, heads: tuple[int, int], head_dim: int, is_causal: bool
) -> None:
    check_dense(*qkv(2, q_len, q_len, heads, head_dim), is_causal=is_causal)


@CAUSAL
@HEAD_DIMS
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(1, 300), (5, 64), (64, 65), (70, 190), (130, 1000), (100, 37), (300, 1), (65, 64), (33, 0)],
)
def test_other_numbers_of_keys(
    q_len: int, kv_len: int, heads: tuple[int, int], head_dim: int, is_causal: bool
) -> None:
    """With a causal mask aligned to the end: queries before the first key see nothing."""
    check_dense(*qkv(2, q_len, kv_len, heads, head_dim), is_causal=is_causal)


@SMALL
@CAUSAL
@HEAD_DIMS
@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 3), (70, 67), (5, 130)])
def test_small(q_len: int, kv_len: int, head_dim: int, is_causal: bool) -> None:
    check_dense(*qkv(1, q_len, kv_len, (4, 1), head_dim), is_causal=is_causal)


@HEAD_DIMS
def test_long_sequences_and_many_ctas(head_dim: int) -> None:
    """More CTAs than fit, in several sections of heads."""
    check_dense(*qkv(2, 1500, 1500, (12, 3), head_dim), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sections_of_heads_whose_keys_exceed_l2(is_causal: bool) -> None:
    q, k, v = randn(1, 70, 4, 128), randn(1, 70_000, 2, 128), randn(1, 70_000, 2, 128)
    check_dense(q, k, v, is_causal=is_causal)


# --- masks ----------------------------------------------------------------------------------------


def random_mask(*shape: int) -> Tensor:
    """Rows that keep half, all, one and none of the keys."""
    keep = torch.rand(shape, device=DEVICE) < 0.5
    kind = torch.randint(0, 5, (*shape[:-1], 1), device=DEVICE)
    keep = torch.where(kind == 1, True, keep)
    one = torch.arange(shape[-1], device=DEVICE) == shape[-1] // 2
    return torch.where(kind == 2, one, torch.where(kind == 3, False, keep))


@CAUSAL
@HEAD_DIMS
@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 40), (70, 70), (130, 257), (100, 37)])
def test_masks(q_len: int, kv_len: int, dims: int, head_dim: int, is_causal: bool) -> None:
    shape = {2: (6, kv_len), 3: (6, q_len, kv_len), 4: (6, 1, q_len, kv_len)}[dims]
    mask = random_mask(*shape)
    check_dense(*qkv(6, q_len, kv_len, (4, 2), head_dim), mask, is_causal)


@SMALL
@CAUSAL
@HEAD_DIMS
def test_masks_small(head_dim: int, is_causal: bool) -> None:
    q, k, v = qkv(2, 35, 70, (2, 1), head_dim)
    for shape in ((2, 70), (2, 35, 70), (2, 1, 35, 70)):
        check_dense(q, k, v, random_mask(*shape), is_causal)


def test_masks_with_strides() -> None:
    q, k, v = qkv(3, 20, 50, (2, 2), 64)
    wide = random_mask(3, 20, 77)
    check_dense(q, k, v, wide[..., 13:63])
    check_dense(q, k, v, random_mask(20, 50).expand(3, 20, 50), is_causal=True)
    check_dense(q, k, v, random_mask(3, 1, 50).expand(3, 20, 50))
    check_dense(q, k, v, random_mask(20, 3, 50).transpose(0, 1))
    check_dense(q, k, v, random_mask(1, 50).expand(3, 50))


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_a_mask_of_nothing_gives_zeros(dims: int) -> None:
    """Whatever V holds: 0 * NaN must not get through."""
    q, k, v = qkv(2, 70, 130, (4, 2), 64)
    v[1] = torch.nan
    shape = {2: (2, 130), 3: (2, 70, 130), 4: (2, 1, 70, 130)}[dims]
    out, lse = attn_prefill(
        q, k, v, torch.zeros(shape, dtype=torch.bool, device=DEVICE), return_lse=True
    )
    assert not out.any() and (lse == -torch.inf).all()


def test_nan_in_masked_keys_stays_there() -> None:
    q, k, v = qkv(1, 20, 70, (2, 1), 64)
    mask = torch.ones(1, 70, dtype=torch.bool, device=DEVICE)
    mask[0, 30:35] = False
    expected = attn_prefill(q, k, v, mask)
    k[:, 30:35] = torch.nan
    assert torch.equal(attn_prefill(q, k, v, mask), expected)


# --- layouts and values ---------------------------------------------------------------------------


@SMALL
@HEAD_DIMS
def test_slices_of_a_fused_projection(head_dim: int) -> None:
    fused = randn(2, 37, 8, head_dim)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    check_dense(q, k, v, is_causal=True)


def test_any_order_of_the_leading_dimensions() -> None:
    q = randn(2, 4, 70, 64).transpose(1, 2)
    k, v = (randn(2, 2, 90, 64).transpose(1, 2) for _ in range(2))
    check_dense(q, k, v, is_causal=True)
    out = torch.empty(70, 2, 4, 64, device=DEVICE, dtype=BF16).transpose(0, 1)
    expected = attn_prefill(q, k, v, is_causal=True)
    assert attn_prefill(q, k, v, is_causal=True, out=out) is out
    assert torch.equal(out, expected)
    one = randn(1, 90, 1, 64)
    check_dense(q, one.expand(2, 90, 2, 64), one.flip(1).expand(2, 90, 2, 64))


def test_out_between_sentinels() -> None:
    """Whole rows are stored, those of other heads and tokens are left alone."""
    wide = torch.full((2, 80, 7, 64), 3.0, device=DEVICE, dtype=BF16)
    q, k, v = qkv(2, 70, 70, (4, 2), 64)
    expected = attn_prefill(q, k, v)
    attn_prefill(q, k, v, out=wide[:, 5:75, 2:6])
    assert torch.equal(wide[:, 5:75, 2:6], expected)
    wide[:, 5:75, 2:6] = 3.0
    assert (wide == 3.0).all()


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 5.0])
@HEAD_DIMS
def test_scales(head_dim: int, scale: float) -> None:
    """Sharp ones move the references of the softmax often."""
    check_dense(*qkv(1, 150, 150, (4, 2), head_dim), is_causal=True, scale=scale)


def test_scores_that_grow_along_the_keys() -> None:
    """Each step exceeds the last: by less than the slack, about it, and by more."""
    q, k, v = randn(1, 70, 2, 64), randn(1, 400, 1, 64), randn(1, 400, 1, 64)
    for growth in (0.01, 0.1, 1.0):
        grown = k * (1 + growth * torch.arange(400, device=DEVICE)[:, None, None])
        for keys in (grown, grown.flip(1), -grown):
            check_dense(q, keys.to(BF16), v)


def test_equal_keys_average_the_values() -> None:
    q, v = randn(1, 10, 2, 64), randn(1, 100, 2, 64)
    out, lse = attn_prefill(q, torch.zeros_like(v), v, return_lse=True)
    torch.testing.assert_close(
        out.double(), v.double().mean(1, keepdim=True).expand(1, 10, 2, 64), rtol=0.01, atol=1e-3
    )
    torch.testing.assert_close(lse, torch.full_like(lse, 100).log())


def test_a_nan_stays_in_its_row() -> None:
    q, k, v = qkv(2, 70, 70, (4, 2), 64)
    clean, clean_lse = attn_prefill(q, k, v, is_causal=True, return_lse=True)
    q[1, 33, 2] = torch.nan
    out, lse = attn_prefill(q, k, v, is_causal=True, return_lse=True)
    assert out[1, 33, 2].isnan().all() and lse[1, 2, 33].isnan()
    out[1, 33, 2], lse[1, 2, 33] = clean[1, 33, 2], clean_lse[1, 2, 33]
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


def test_offsets_beyond_32_bits() -> None:
    """Sequences 4 GiB apart in one allocation."""
    memory = torch.empty(2**32 + 2**20, device=DEVICE, dtype=BF16)
    k = memory.as_strided((3, 70, 2, 64), (2**31, 128, 64, 1))
    v = memory[2**19 :].as_strided((3, 70, 2, 64), (2**31, 128, 64, 1))
    k.copy_(randn(3, 70, 2, 64))
    v.copy_(randn(3, 70, 2, 64))
    check_dense(randn(3, 50, 4, 64), k, v, is_causal=True)


@pytest.mark.parametrize("q_shape", [(0, 5, 4, 64), (2, 0, 4, 64), (2, 5, 0, 64)])
def test_empty_results(q_shape: tuple[int, ...]) -> None:
    k = randn(q_shape[0], 9, 2, 64)
    out, lse = attn_prefill(randn(*q_shape), k, k, return_lse=True)
    assert out.shape == q_shape and lse.shape == (q_shape[0], q_shape[2], q_shape[1])


# --- paged ----------------------------------------------------------------------------------------

RAGGED = (
    ([70, 10, 130], [70, 10, 130]),
    ([1, 0, 65, 3], [300, 5, 65, 64]),
    ([0, 300, 1, 0], [0, 511, 1, 7]),
    ([64, 128, 33], [63, 0, 40]),
)


@HEAD_DIMS
@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 32, 64, 256])
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_ragged_batches(
    lengths: tuple[list[int], list[int]], page_size: int, heads_first: bool, head_dim: int
) -> None:
    case = paged(*lengths, head_dim=head_dim, page_size=page_size, heads_first=heads_first)
    check_paged(case)
    check_paged(case, is_causal=False)


@CAUSAL
@HEADS
@HEAD_DIMS
def test_groups_of_heads(head_dim: int, heads: tuple[int, int], is_causal: bool) -> None:
    """Tiles of the maps that several CTAs share, and CTAs that take several tiles."""
    case = paged(
        [129, 64, 200, 5], [129, 100, 222, 5], q_heads=heads[0], kv_heads=heads[1],
        head_dim=head_dim,
    )  # fmt: skip
    check_paged(case, is_causal=is_causal, scale=0.2)


@SMALL
@HEAD_DIMS
@pytest.mark.parametrize("page_size", [1, 4, 16, 128])
def test_ragged_batches_small(page_size: int, head_dim: int) -> None:
    case = paged([3, 0, 66, 1], [20, 2, 66, 0], head_dim=head_dim, page_size=page_size)
    check_paged(case)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_paged_is_bitwise_contiguous(page_size: int) -> None:
    q, k, v = randn(2, 333, 8, 128), randn(2, 333, 2, 128), randn(2, 333, 2, 128)
    case = paged([333] * 2, [333] * 2, q_heads=8, head_dim=128, page_size=page_size)
    k, v = (torch.cat([kv[i] for kv in case.keys]) for i in range(2))
    expected, lse = attn_prefill(case.q.view_as(q), k, v, is_causal=True, return_lse=True)
    out, packed_lse = attn_paged_prefill(**case.operands, return_lse=True)
    assert torch.equal(out.view_as(q), expected)
    assert torch.equal(packed_lse.view(8, 2, 333).transpose(0, 1), lse)


def test_shared_pages_and_strided_pools() -> None:
    """Two sequences with a common beginning, in one layer of a cache of several."""
    cache = torch.full((9, 3, 2, 16, 2, 64), torch.nan, device=DEVICE, dtype=BF16)
    k_pool, v_pool = cache[:, 1, 0], cache[:, 1, 1]
    k, v = randn(2, 40, 2, 64), randn(2, 40, 2, 64)
    k[1, :32], v[1, :32] = k[0, :32], v[0, :32]
    table = indices([4, 0, 7, 4, 0, 2]).view(2, 3)
    for batch, page in itertools.product(range(2), range(3)):
        rows = slice(16 * page, min(16 * page + 16, 40))
        at = table[batch, page].item()
        k_pool[at, : rows.stop - rows.start] = k[batch, rows]
        v_pool[at, : rows.stop - rows.start] = v[batch, rows]
    q = randn(2, 40, 4, 64)
    out, lse = attn_paged_prefill(
        q.view(80, 4, 64), k_pool, v_pool, table, *(indices([0, 40, 80]),) * 2,
        indices([0, 1]), indices([0, 0]), page_size=16, return_lse=True,
    )  # fmt: skip
    lse = lse.view(4, 2, 40).transpose(0, 1)
    check_values(out.view(2, 40, 4, 64), lse, q, k, v, is_causal=True)


def test_pages_beyond_32_bits() -> None:
    pool = torch.empty(2**32 + 2**12, device=DEVICE, dtype=BF16)
    k_pool = pool.as_strided((2**20 + 1, 16, 1, 64), (2**12, 64, 64, 1))
    v_pool = pool[1024:].as_strided((2**20, 16, 1, 64), (2**12, 64, 64, 1))
    k_pool = k_pool[: 2**20]
    k, v = randn(1, 40, 1, 64), randn(1, 40, 1, 64)
    pages = [2**20 - 1, 3, 2**19 + 5]
    for number, page in enumerate(pages):
        rows = slice(16 * number, min(16 * number + 16, 40))
        k_pool[page, : rows.stop - rows.start] = k[0, rows]
        v_pool[page, : rows.stop - rows.start] = v[0, rows]
    q = randn(40, 2, 64)
    ends, zero = indices([0, 40]), indices([0])
    out, lse = attn_paged_prefill(
        q, k_pool, v_pool, indices(pages)[None], ends, ends, zero, zero,
        page_size=16, return_lse=True,
    )  # fmt: skip
    check_values(out[None], lse[None], q[None], k, v, is_causal=True)


def test_no_queries_at_all() -> None:
    case = paged([0, 0], [5, 0])
    out, lse = attn_paged_prefill(**case.operands, return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)
