# SPDX-License-Identifier: Apache-2.0
"""References in float64.

Where an op keeps the bf16 rounding boundaries of the computation that it fuses, so does the
reference: an exact one would charge the op with the rounding that its contract demands.
"""

from __future__ import annotations

import torch
from torch import Tensor


def round_bf16(x: Tensor) -> Tensor:
    """The float64 values that a bf16 tensor of `x` holds."""
    # Through fp32, as kernels accumulate: a direct conversion differs on no value that fp32 holds.
    return x.float().bfloat16().double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x ``[..., K]``, weight ``[N, K]``, bias ``[N]``."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def swiglu(x: Tensor, up_weight: Tensor, gate_weight: Tensor) -> Tensor:
    """``(x @ up.T) * silu(x @ gate.T)`` without a rounding in between."""
    gate = linear(x, gate_weight)
    return linear(x, up_weight) * (gate * torch.sigmoid(gate))


def swiglu_bf16(x: Tensor, up_weight: Tensor, gate_weight: Tensor) -> Tensor:
    """`swiglu` with both projections, the SiLU output and the product rounded to bf16."""
    up = round_bf16(linear(x, up_weight))
    gate = round_bf16(linear(x, gate_weight))
    return round_bf16(up * round_bf16(gate * torch.sigmoid(gate)))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(y, h)`` as a Llama layer has it, with its bf16 roundings.

    ``h = bf16(x + residual)`` goes on as the residual; ``y = bf16(weight * bf16(h / rms(h)))``.
    """
    h = round_bf16(x.double() + residual.double())
    normed = round_bf16(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps))
    return round_bf16(weight.double() * normed), h


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Each pair ``(a, b)`` of a head turned to ``(a * cos - b * sin, b * cos + a * sin)``.

    Args:
        x: ``[..., seq, heads, head_dim]``.
        cos: ``[..., seq, head_dim / 2]``; leading dimensions may be missing.
        sin: as `cos`.
        interleaved: whether pairs are ``(2i, 2i + 1)`` or ``(i, i + head_dim / 2)``.
    """
    pairs = x.double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    dim = -1 if interleaved else -2
    a, b = pairs.unbind(dim)
    c, s = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    return torch.stack((a * c - b * s, b * c + a * s), dim).flatten(-2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of attention; a query that may see no key gives zeros and ``-inf``.

    Args:
        q: ``[B, L, heads, head_dim]``.
        k: ``[B, S, kv_heads, head_dim]``; query head ``h`` reads head ``h * kv_heads // heads``.
        v: as `k`.
        mask: bool, True keeps a key: ``[B, S]``, ``[B, L, S]`` or ``[B, 1, L, S]``.
        is_causal: the last query sees all of its sequence's keys, the one before all but the last.
        kv_lens: keys of each sequence, ``[B]``; what `k` and `v` hold past them does not matter.
        scale: ``1 / sqrt(head_dim)`` by default.

    Returns:
        ``out`` as `q`, and ``lse`` ``[B, heads, L]``, the natural logarithm of the denominator.
    """
    q_len, kv_len, group = q.shape[1], k.shape[1], q.shape[2] // max(k.shape[2], 1)
    key = torch.arange(kv_len, device=q.device)
    lengths = torch.full((len(q),), kv_len, device=q.device) if kv_lens is None else kv_lens
    inside = key < lengths[:, None]
    seen = inside[:, None, None].expand(-1, 1, q_len, -1)
    if is_causal:
        last = lengths[:, None] - q_len + torch.arange(q_len, device=q.device)
        seen = seen & (key <= last[..., None])[:, None]
    if mask is not None:
        rows = 1 if mask.dim() == 2 else q_len
        seen = seen & mask.reshape(len(q), 1, rows, kv_len)
    queries, keys, values = (x.double().transpose(1, 2) for x in (q, k, v))
    # A NaN times a probability of 0 is a NaN.
    keys, values = (
        x.masked_fill(~inside[:, None, :, None], 0).repeat_interleave(group, 1)
        for x in (keys, values)
    )
    scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(seen, (scores - lse[..., None]).exp(), 0)
    return (weights @ values).transpose(1, 2), lse
