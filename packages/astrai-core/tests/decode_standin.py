# SPDX-License-Identifier: Apache-2.0
"""The ops that composed decode calls, as its stand-in families have them: in fp32, by torch.

Its source is copied into stand-in distributions, so it imports torch alone. `calls` holds the ops
that ran.
"""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[str] = []


def linear(x: Tensor, weight: Tensor) -> Tensor:
    assert x.is_contiguous() and weight.stride(1) == 1
    return (x.float() @ weight.float().T).to(x.dtype)


def bf16_gemv(x, weight, bias=None, *, out=None, static_weights=False):
    calls.append("bf16_gemv")
    assert bias is None and out is None and static_weights
    return linear(x, weight)


def bf16_swiglu(x, up_weight, gate_weight, *, out=None, static_weights=False):
    calls.append("bf16_swiglu")
    assert out is None and static_weights
    up, gate = linear(x, up_weight), linear(x, gate_weight)
    return up * torch.nn.functional.silu(gate)


def add_rms_norm(x, residual, weight, eps, *, static_weights=False):
    calls.append("add_rms_norm")
    assert static_weights and x.is_contiguous() and residual.is_contiguous()
    s = x + residual
    wide = s.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), s


def rotary_emb(x, cos, sin, *, interleaved, out):
    calls.append("rotary_emb")
    assert out is x and not interleaved and cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (x.shape[0], 1, x.shape[-1] // 2)
    a, b = x.float().chunk(2, -1)
    c, s = cos[:, :, None], sin[:, :, None]
    x.copy_(torch.cat((a * c - b * s, b * c + a * s), -1))
    return out


def attn_paged_decode(
    q, k_pool, v_pool, page_table, seq_lens, *, page_size, new_k, new_v, static_cache, out,
):  # fmt: skip
    calls.append("attn_paged_decode")
    assert static_cache
    assert page_table.dtype == seq_lens.dtype == torch.int32
    assert k_pool.shape[1] == page_size and k_pool.stride() == v_pool.stride()
    for b, length in enumerate(seq_lens.tolist()):
        at = [(int(page_table[b, p // page_size]), p % page_size) for p in range(length)]
        k_pool[at[-1]], v_pool[at[-1]] = new_k[b, 0], new_v[b, 0]
        groups = q.shape[2] // k_pool.shape[2]
        k, v = (
            torch.stack([pool[place] for place in at]).float().repeat_interleave(groups, 1)
            for pool in (k_pool, v_pool)
        )
        scores = torch.einsum("hd,shd->hs", q[b, 0].float(), k) * q.shape[-1] ** -0.5
        out[b, 0] = torch.einsum("hs,shd->hd", scores.softmax(-1), v).to(q.dtype)
    return out
