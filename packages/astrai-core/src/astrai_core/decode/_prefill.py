# SPDX-License-Identifier: Apache-2.0
"""Reading a prompt into the cache that `decode_step` goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.attn import Step, apply_rotary_emb, attention
from astrai_core.ops import linear, swiglu

from ._arguments import Weights
from ._checks import indices, no_autocast
from ._config import Config
from ._torch import rms_norm

__all__ = ["prefill"]


@torch.no_grad()
def prefill(
    weights: Mapping[str, Any], cfg: Mapping[str, Any], token_ids: Tensor, step: Step
) -> Tensor:
    """Runs the new tokens of a step through the model; their keys and values go into the cache.

    `linear`, `swiglu`, `apply_rotary_emb` and `attention` compute it, each selected as ever.
    Autocast has no effect.

    Args:
        weights: as for `build_model`.
        cfg: as for `build_model`.
        token_ids: int64, on the weights' device: ``(B, L)`` where each sequence has L new tokens,
            or ``(total_q,)``: the sequences one after the other.
        step: what `PagedKVCache.begin_step` returned for these tokens.

    Returns:
        Logits ``(B, vocab)`` of the token after the last one of each sequence.

    Raises:
        ValueError: weights, cfg, token_ids or the cache of the step do not fit, or not each other;
            a token id on the CPU is out of range. On a GPU that is an assertion of the device.
        TypeError: an argument of another type or dtype.
        RuntimeError: the step is outdated. After any error the step's tokens are unwritten in some
            layers or all: take them back with `PagedKVCache.truncate`.
    """
    c = Config.parse(cfg)
    w = Weights.parse(weights, c)
    _check_step(step, c, w.embed.device)
    uniform = (len(step.seqs), step.max_q_len)
    shapes: list[tuple[int, ...]] = [(step.total_q,)]
    if step.uniform:
        shapes.append(uniform)
    indices("token_ids", token_ids, shapes, w.embed.device, c.vocab)
    with no_autocast(w.embed.device):
        return _logits(c, w, token_ids, step)


def _check_step(step: Any, c: Config, device: torch.device) -> None:
    """Checks that a step is current, and of a cache of this model."""
    if not isinstance(step, Step):
        raise TypeError(
            f"step: expected that of PagedKVCache.begin_step, got {type(step).__name__}"
        )
    pool, _ = step.pools(0)
    found = (step.num_layers, *pool.shape[-2:], pool.dtype, pool.device)
    expected = (c.layers, c.n_kv, c.hd, c.dtype, device)
    if found != expected:
        words = "{} layers of {} heads of {} in {} on {}"
        raise ValueError(
            f"step: expected a cache of {words.format(*expected)}, got {words.format(*found)}"
        )


def _logits(c: Config, w: Weights, token_ids: Tensor, step: Step) -> Tensor:
    angles = c.angles(step.max_kv_len, w.embed.device)[step.positions]
    cos, sin = (part.contiguous() for part in angles.chunk(2, -1))
    x = F.embedding(token_ids.reshape(1, -1), w.embed)
    for number, layer in enumerate(w.layers):
        h = rms_norm(x, layer.in_norm, c.eps)
        q, k, v = (
            linear(h, weight).unflatten(-1, (-1, c.hd)) for weight in (layer.q, layer.k, layer.v)
        )
        q, k = (apply_rotary_emb(y, (cos, sin), interleaved=False) for y in (q, k))
        y = attention(q, k, v, step, number, is_causal=True)
        x = x + linear(y.flatten(-2), layer.o)
        h = rms_norm(x, layer.post_norm, c.eps)
        x = x + linear(swiglu(h, layer.up, layer.gate), layer.down)
    last = rms_norm(x[0, step.qo_indptr[1:] - 1], w.final_norm, c.eps)
    return linear(last, w.lm_head)
