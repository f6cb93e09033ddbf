# SPDX-License-Identifier: Apache-2.0
"""Native module of a stand-in attention family: the ops' contract, computed the slow way.

Its source is copied into a stand-in distribution, so it imports torch alone. Results are computed
in float64 from the arguments only, and `calls` holds the ops that ran.
"""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[str] = []
tile_rows = 64


def rows(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attention of one sequence, [L, heads, head_dim]; keep [L, S]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q.double(), k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("hls,shd->lhd", weights, v).to(q.dtype)


def triangle(q_len: int, kv_len: int, is_causal: bool) -> Tensor:
    keep = torch.ones(q_len, kv_len, dtype=torch.bool)
    return keep.tril(kv_len - q_len) if is_causal else keep


def assert_aligned(*operands: Tensor) -> None:
    """Rows that start on 16 bytes, as the kernels' copies need them."""
    for x in operands:
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
        steps = zip(x.stride()[:-1], x.shape[:-1], strict=True)
        assert all(size == 1 or step * x.itemsize % 16 == 0 for step, size in steps)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    assert mask is None or mask.dim() in (2, 3)
    assert_aligned(q, k, v)
    outputs = []
    for b in range(q.shape[0]):
        keep = triangle(q.shape[1], k.shape[1], is_causal)
        outputs.append(rows(q[b], k[b], v[b], keep if mask is None else keep & mask[b]))
    return torch.stack(outputs)


def attn_decode(q, k, v, mask=None, is_causal=False, *, scale=None, return_lse=False, out=None):
    calls.append("attn_decode")
    assert q.shape[1] == 1 and (scale, return_lse, out) == (None, False, None)
    return dense(q, k, v, mask, is_causal)


def attn_prefill(q, k, v, mask=None, is_causal=False, *, scale=None, return_lse=False, out=None):
    calls.append("attn_prefill")
    assert (scale, return_lse, out) == (None, False, None)
    return dense(q, k, v, mask, is_causal)


def of_pages(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    size = pool.shape[1]
    return torch.stack([pool[int(pages[i // size]), i % size] for i in range(length)])


def attn_paged_decode(
    q, k_pool, v_pool, page_table, seq_lens, *, page_size, new_k=None, new_v=None,
    scale=None, return_lse=False, out=None,
):  # fmt: skip
    calls.append("attn_paged_decode")
    assert q.dim() == 4 and q.shape[1] == 1 and k_pool.shape[1] == page_size
    assert (scale, return_lse, out) == (None, False, None)
    assert_aligned(q, k_pool, v_pool, new_k, new_v)
    outputs = []
    for b, length in enumerate(seq_lens.tolist()):
        page = int(page_table[b, (length - 1) // page_size])
        for pool, new in ((k_pool, new_k), (v_pool, new_v)):
            pool[page, (length - 1) % page_size] = new[b, 0]
        k, v = (of_pages(pool, page_table[b], length) for pool in (k_pool, v_pool))
        outputs.append(rows(q[b], k, v, triangle(1, length, True)))
    return torch.stack(outputs)


def attn_paged_prefill(
    q, k_pool, v_pool, page_table, qo_indptr, kv_indptr, q_tile_to_batch, q_tile_to_index, *,
    page_size, is_causal,
):  # fmt: skip
    calls.append("attn_paged_prefill")
    assert q.dim() == 3 and k_pool.shape[1] == page_size
    assert_aligned(q, k_pool, v_pool)
    out = torch.full_like(q, torch.nan)
    for b, tile in zip(q_tile_to_batch.tolist(), q_tile_to_index.tolist(), strict=True):
        first, end = qo_indptr[b : b + 2].tolist()
        kv_len = int(kv_indptr[b + 1] - kv_indptr[b])
        k, v = (of_pages(pool, page_table[b], kv_len) for pool in (k_pool, v_pool))
        part = slice(tile_rows * tile, min(tile_rows * (tile + 1), end - first))
        keep = triangle(end - first, kv_len, is_causal)[part]
        out[first:end][part] = rows(q[first:end][part], k, v, keep)
    return out


def rotary_emb(x, cos, sin, *, interleaved):
    calls.append("rotary_emb")
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape[:-1] in (x.shape[1:2], x.shape[:2]) and sin.shape == cos.shape
    wide, angles = x.double(), (cos.double().unsqueeze(-2), sin.double().unsqueeze(-2))
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = a * angles[0] - b * angles[1], b * angles[0] + a * angles[1]
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return joined.to(x.dtype)
