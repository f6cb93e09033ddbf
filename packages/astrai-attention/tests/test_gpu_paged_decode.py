# SPDX-License-Identifier: Apache-2.0
"""attn_paged_decode on a GPU: values against float64, pages in hostile memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_operands import BF16, NO_PAGE, Paged, check_values, paged, same_bits
from operands import randn
from torch import Tensor

from astrai_attention import attn_decode, attn_paged_decode
from kernelkit.poison import guarded_output, misaligned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

SMALL = pytest.mark.sanitize
HEAD_DIMS = pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 2, 4, 16, 32, 64, 128, 256])
APPEND = pytest.mark.parametrize("append", [False, True], ids=["", "append"])
LAYOUTS = pytest.mark.parametrize("heads_first", [False, True], ids=["tokens", "heads"])


def check_paged(
    cache: Paged, q: Tensor, *, scale: float | None = None, static_cache: bool = False
) -> tuple[Tensor, Tensor]:
    """Poisoned output between guards; the pools hold what they should, and nothing else moved."""
    guarded = guarded_output(q.shape, device="cuda")
    result = attn_paged_decode(
        q,
        **cache.arguments,
        scale=scale,
        return_lse=True,
        out=guarded.tensor,
        static_cache=static_cache,
    )
    assert result[0] is guarded.tensor
    guarded.check()
    check_values(result, q, cache.k, cache.v, cache.keep, scale)
    for pool, filled in zip((cache.k_pool, cache.v_pool), cache.filled, strict=True):
        assert same_bits(pool, filled)
    # The newest token is read from new_k and new_v again, and stored again.
    for early in (False, True):
        again = attn_paged_decode(q, **cache.arguments, scale=scale, static_cache=early)
        assert torch.equal(again, result[0])
    for pool, filled in zip((cache.k_pool, cache.v_pool), cache.filled, strict=True):
        assert same_bits(pool, filled)
    return result


@HEAD_DIMS
@PAGE_SIZES
@APPEND
@LAYOUTS
def test_ragged_lengths(page_size: int, head_dim: int, append: bool, heads_first: bool) -> None:
    options: dict[str, Any] = {
        "page_size": page_size,
        "head_dim": head_dim,
        "heads_first": heads_first,
        "append": append,
    }
    lengths = [0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 500, 0]
    check_paged(paged(lengths, capacity=512, **options), randn(len(lengths), 1, 6, head_dim))
    lengths = [1000, 1, 0, 2047]
    check_paged(paged(lengths, capacity=2048, **options), randn(len(lengths), 1, 6, head_dim))
    # Few units and a long row of the table: splits, most of them of sequences that end before.
    lengths = [3333, 1]
    check_paged(paged(lengths, capacity=20_000, **options), randn(len(lengths), 1, 6, head_dim))


@SMALL
@pytest.mark.parametrize("page_size", [1, 8, 64])
@APPEND
@pytest.mark.parametrize("capacity", [128, 1024, 2112])
def test_small(page_size: int, append: bool, capacity: int) -> None:
    cache = paged([0, 1, 70, 128], page_size=page_size, capacity=capacity, append=append)
    check_paged(cache, randn(4, 1, 18, 64))


@SMALL
@HEAD_DIMS
@APPEND
def test_small_of_each_head_dim(head_dim: int, append: bool) -> None:
    options: dict[str, Any] = {"kv_heads": 1, "head_dim": head_dim, "append": append}
    check_paged(paged([33, 16, 0], page_size=16, capacity=64, **options), randn(3, 1, 4, head_dim))
    check_paged(paged([257], page_size=16, capacity=4096, **options), randn(1, 1, 4, head_dim))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(3, 3), (6, 2), (8, 2), (8, 1), (18, 2), (16, 1), (32, 8)]
)
@APPEND
@pytest.mark.parametrize("capacity", [1024, 4096])
def test_ratios_of_heads(q_heads: int, kv_heads: int, append: bool, capacity: int) -> None:
    cache = paged(
        [1000, 1, 600],
        page_size=16,
        capacity=capacity,
        kv_heads=kv_heads,
        head_dim=128,
        append=append,
    )
    check_paged(cache, randn(3, 1, q_heads, 128))


@SMALL
@pytest.mark.parametrize("capacity", [64, 1024, 4096])
@pytest.mark.parametrize("q_heads", [4, 18])
def test_the_newest_token_comes_from_its_operands(q_heads: int, capacity: int) -> None:
    """With one CTA, a cluster and splits, and CTAs that share a KV head: what the pool holds there
    before the call reaches nobody, whoever of them stores the token."""
    cache = paged([64, 1, 33], page_size=16, capacity=capacity, append=True)
    q = randn(3, 1, q_heads, 64)
    expected = check_paged(cache, q)[0]
    for fill in (torch.nan, 3.0):
        for pool, filled in zip((cache.k_pool, cache.v_pool), cache.filled, strict=True):
            pool.copy_(filled)
            for b, length in enumerate((64, 1, 33)):
                page = cache.page_table[b, (length - 1) // 16]
                pool[page, (length - 1) % 16] = fill
        assert torch.equal(attn_paged_decode(q, **cache.arguments), expected)
        for pool, filled in zip((cache.k_pool, cache.v_pool), cache.filled, strict=True):
            assert same_bits(pool, filled)


@pytest.mark.parametrize("batch", [17, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@APPEND
def test_batches(batch: int, head_dim: int, append: bool) -> None:
    lengths = [(i * 37) % 301 for i in range(batch)]
    cache = paged(
        lengths, page_size=16, capacity=4096, kv_heads=8, head_dim=head_dim, append=append
    )
    check_paged(cache, randn(batch, 1, 32, head_dim))


@pytest.mark.parametrize("batch", [17, 33])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [16, 256])
def test_many_tiles_of_a_warp(page_size: int, head_dim: int, batch: int) -> None:
    """So many units that each has one CTA, whose warps take ids of eight tiles at a time."""
    tile = 32 if head_dim == 64 else 16
    turn = tile * (8 if batch == 17 else 4)  # tokens, of a tile of each warp
    lengths = [0, 1, 18 * turn + 5]
    for turns in (8, 16):
        lengths += [turns * turn + more for more in (-1, 0, 1, tile, turn)]
    lengths += [i * 97 % (18 * turn) for i in range(batch - len(lengths))]
    cache = paged(
        lengths,
        page_size=page_size,
        capacity=30 * turn,
        kv_heads=8,
        head_dim=head_dim,
        append=True,
    )
    check_paged(cache, randn(batch, 1, 8, head_dim))


# On an H200 one CTA, a cluster and splits; each warp asks for the ids of 16 of its tiles at once.
@pytest.mark.parametrize(("kv_heads", "capacity"), [(8, 8192), (1, 3072), (1, 32_768)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [8, 16, 64])
@APPEND
def test_ids_past_a_sequence_are_not_used(
    page_size: int, head_dim: int, kv_heads: int, capacity: int, append: bool
) -> None:
    """Those of pages of NaN beside the pools, and those that lead out of all memory."""
    cache = paged(
        [0, 1, 15, 16, 17, 31, 32, 33, 128 * 16, 128 * 16 + 1],
        page_size=page_size,
        capacity=capacity,
        kv_heads=kv_heads,
        head_dim=head_dim,
        append=append,
    )
    pages, *page = cache.k_pool.shape
    table = cache.page_table.cpu()
    unused = torch.tensor([-1, pages, 2**31 - 1, -(2**31)], dtype=torch.int32)
    unused = unused[torch.arange(table.numel()).view_as(table) % 4]
    table = torch.where(table == NO_PAGE, unused, table).cuda()
    q = randn(len(table), 1, 2 * kv_heads, head_dim)
    for static_cache in (False, True):
        wide = torch.full((2, pages + 2, *page), torch.nan, device="cuda", dtype=BF16)
        pools = wide[:, 1:-1]
        pools[0], pools[1] = cache.k_pool, cache.v_pool
        hostile = replace(cache, k_pool=pools[0], v_pool=pools[1], page_table=table)
        check_paged(hostile, q, static_cache=static_cache)
        assert wide[:, [0, -1]].isnan().all()


@pytest.mark.parametrize(
    ("length", "capacity"), [(700, 700), (2048, 2048), (5000, 5000), (700, 4096), (3500, 4096)]
)
@PAGE_SIZES
def test_pages_change_no_bit(length: int, capacity: int, page_size: int) -> None:
    """Of one capacity, the same plan and the same order of additions as over contiguous K and V."""
    cache = paged([length] * 2, page_size=page_size, capacity=capacity, head_dim=128)
    q = randn(2, 1, 8, 128)
    out = attn_paged_decode(q, **cache.arguments)
    capacity = cache.page_table.shape[1] * page_size
    k, v = (torch.zeros(2, capacity, 2, 128, device="cuda", dtype=BF16) for _ in range(2))
    k[:, :length], v[:, :length] = cache.k, cache.v
    mask = (torch.arange(capacity, device="cuda") < length).expand(2, capacity)
    assert torch.equal(out, attn_decode(q, k, v, mask))


@pytest.mark.parametrize("capacity", [512, 4096])
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_scales(scale: float, capacity: int) -> None:
    cache = paged([500, 31], page_size=16, capacity=capacity, append=True)
    check_paged(cache, randn(2, 1, 8, 64), scale=scale)


@SMALL
@pytest.mark.parametrize("capacity", [64, 3200])
def test_slices_of_fused_projections(capacity: int) -> None:
    cache = paged([40, 7], page_size=8, capacity=capacity, append=True)
    fused = torch.full((2, 1, 10, 64), torch.nan, dtype=BF16)
    fused[:, :, :6] = torch.randn(2, 1, 6, 64).to(BF16)
    fused[:, :, 6:8], fused[:, :, 8:] = cache.new["new_k"].cpu(), cache.new["new_v"].cpu()
    fused = fused.cuda()
    cache.new = {"new_k": fused[:, :, 6:8], "new_v": fused[:, :, 8:]}
    check_paged(cache, fused[:, :, :6])
    # The strides of new_k and new_v have nothing to do with one another.
    cache.new["new_k"] = misaligned(cache.new["new_k"], 8, row_padding=8)
    check_paged(cache, fused[:, :, :6])


@SMALL
@APPEND
def test_a_slice_of_a_wider_page_table(append: bool) -> None:
    cache = paged([40, 0, 9], page_size=8, capacity=48, append=append)
    wide = torch.full((3, 20), NO_PAGE, dtype=torch.int32)
    wide[:, 5:11] = cache.page_table.cpu()
    cache.page_table = wide.cuda()[:, 5:11]
    check_paged(cache, randn(3, 1, 4, 64))


def test_k_and_v_of_one_tensor() -> None:
    """Pools of several layers in one allocation: only this layer's move."""
    cache = paged([40, 0, 129], page_size=16, capacity=256, append=True)
    layers = torch.full((3, 2, *cache.k_pool.shape), torch.nan, device="cuda", dtype=BF16)
    layers[1, 0], layers[1, 1] = cache.k_pool, cache.v_pool
    cache.k_pool, cache.v_pool = layers[1, 0], layers[1, 1]
    check_paged(cache, randn(3, 1, 4, 64))
    assert layers[0].isnan().all() and layers[2].isnan().all()


def test_pages_of_two_sequences() -> None:
    """A common prefix: two rows of the table name the same pages."""
    cache = paged([300, 300], page_size=64, capacity=320, head_dim=128)
    cache.page_table[1, :3] = cache.page_table[0, :3]
    cache.k[1, :192], cache.v[1, :192] = cache.k[0, :192], cache.v[0, :192]
    check_paged(cache, randn(2, 1, 8, 128))


@SMALL
@APPEND
def test_lengths_out_of_range_stay_inside_the_table(append: bool) -> None:
    """They are not known on the host; the device takes the nearest one that is possible."""
    cache = paged([48, 0, 48], page_size=16, capacity=48, append=append)
    q = randn(3, 1, 4, 64)
    expected = attn_paged_decode(q, **cache.arguments)
    for lengths in ([49, -1, 48], [2**31 - 1, -(2**31), 2**20]):
        cache.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        assert torch.equal(attn_paged_decode(q, **cache.arguments), expected)
    for pool, filled in zip((cache.k_pool, cache.v_pool), cache.filled, strict=True):
        assert same_bits(pool, filled)


@SMALL
def test_no_pages_and_no_sequences() -> None:
    cache = paged([0, 0], page_size=16, capacity=64)
    q = randn(2, 1, 4, 64)
    cache.page_table = cache.page_table[:, :0].contiguous()
    out, lse = attn_paged_decode(q, **cache.arguments, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    cache.page_table, cache.seq_lens = cache.page_table[:0], cache.seq_lens[:0]
    out, lse = attn_paged_decode(q[:0], **cache.arguments, return_lse=True)
    assert out.shape == (0, 1, 4, 64) and lse.shape == (0, 4, 1)


@APPEND
def test_offsets_beyond_32_bits(append: bool) -> None:
    """Pages 4 GiB apart."""
    cache = paged([40, 0], page_size=16, capacity=48, append=append)
    used = cache.page_table[0].long()
    far = []
    for source in (cache.k_pool, cache.v_pool):
        memory = torch.empty(2 * 2**31 + 2048, device="cuda", dtype=BF16)
        far.append(memory.as_strided((3, 16, 2, 64), (2**31, 128, 64, 1)))
        far[-1].copy_(source[used])
    cache.k_pool, cache.v_pool = far
    cache.filled = (cache.filled[0][used], cache.filled[1][used])
    cache.page_table[0] = torch.arange(3, device="cuda")
    check_paged(cache, randn(2, 1, 4, 64))
