# SPDX-License-Identifier: Apache-2.0
"""Decoding by torch's operators: the reference for every other implementation, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.attn._sdpa import dense
from astrai_core.attn.rotary import by_torch as rotate

from ._arguments import Layer, Problem

__all__ = ["TorchDecoder", "rms_norm"]


class _Place(NamedTuple):
    """Where a step's tokens go, and what they attend to.

    Attributes:
        page: ``[B]``: the page of each new token.
        slot: its place in the page: a number, or ``[B]``.
        pages: ``[B, pages]`` that hold the tokens; None where the cache is contiguous.
        length: tokens to read.
        mask: ``[B, length]``, True for tokens that are there; None where all are.
    """

    page: Tensor
    slot: int | Tensor
    pages: Tensor | None
    length: int
    mask: Tensor | None


class TorchDecoder:
    """The contract, step by step.

    With a Python int as the position, only the tokens that are there are read. A position on the
    device stays there: everything up to `max_seq_len` is read and masked.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        cache = problem.cache
        with torch.inference_mode(False), torch.no_grad():
            self._angles = problem.config.angles(problem.max_seq_len, problem.device)
            self._rows = torch.arange(cache.batch, device=problem.device)
            self._table = None if cache.table is None else cache.table.long()
            self._positions = torch.arange(problem.max_seq_len, device=problem.device)

    @torch.no_grad()
    def step(self, token_ids: Tensor, pos: int | Tensor) -> Tensor:
        """Logits ``[B, vocab]`` of the tokens after these."""
        problem, c = self._problem, self._problem.config
        weights = problem.weights
        if isinstance(pos, Tensor):
            # Before anything is written: an index would take a negative position for one from the
            # end, but `index_select` asserts on the device that it is none.
            angles = self._angles.index_select(0, pos.reshape(-1))
            pos = pos.expand(problem.cache.batch)
        else:
            angles = self._angles[pos]
        place = self._place(pos)
        angles = angles.expand(problem.cache.batch, c.hd)[:, None]
        cos, sin = angles.chunk(2, -1)
        x = F.embedding(token_ids, weights.embed)
        for number, layer in enumerate(weights.layers):
            h = rms_norm(x, layer.in_norm, c.eps)
            x = x + F.linear(self._attention(number, layer, h, cos, sin, place), layer.o)
            h = rms_norm(x, layer.post_norm, c.eps)
            gated = F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up)
            x = x + F.linear(gated, layer.down)
        return F.linear(rms_norm(x, weights.final_norm, c.eps), weights.lm_head)

    def close(self) -> None:
        """Nothing is held but tensors."""

    def tensors(self) -> list[Tensor]:
        """What was allocated here."""
        found = [self._angles, self._rows, self._positions]
        return found if self._table is None else [*found, self._table]

    def _place(self, pos: int | Tensor) -> _Place:
        size = self._problem.cache.page_size
        length, mask = self._problem.max_seq_len, None
        if isinstance(pos, int):
            length = pos + 1
        else:
            mask = self._positions <= pos[:, None]
        if self._table is None:
            return _Place(self._rows, pos, None, length, mask)
        page = self._table[self._rows, pos // size]
        return _Place(page, pos % size, self._table[:, : -(-length // size)], length, mask)

    def _attention(
        self, number: int, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, place: _Place
    ) -> Tensor:
        c, cache = self._problem.config, self._problem.cache
        q, k, v = (
            F.linear(h, weight).view(h.shape[0], 1, -1, c.hd)
            for weight in (layer.q, layer.k, layer.v)
        )
        q, k = (rotate(x, cos, sin, interleaved=False) for x in (q, k))
        read = []
        for pool, new in ((cache.keys[number], k), (cache.values[number], v)):
            pool[place.page, :, place.slot] = new[:, 0]
            read.append(_read(pool, place).transpose(1, 2))
        return dense(q, read[0], read[1], place.mask, is_causal=False).flatten(1)


def _read(pool: Tensor, place: _Place) -> Tensor:
    """Keys or values of the sequences, ``[B, n_kv, length, hd]``."""
    rows = pool if place.pages is None else pool[place.pages].transpose(1, 2).flatten(2, 3)
    rows = rows[:, :, : place.length]
    if place.mask is None:
        return rows
    # Never written memory may hold a NaN, which no weight of 0 removes.
    return rows.masked_fill(~place.mask[:, None, :, None], 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / sqrt(mean(x^2) + eps))``, fp32 inside, rounded as Llama's module rounds."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
