# SPDX-License-Identifier: Apache-2.0
"""Decoding by the kernels of the installed families, in one CUDA graph.

A step is a chain of kernels of which each is launched while the one before it runs: it fetches the
weights or the keys and values of earlier tokens, which nobody writes meanwhile, and then waits for
its input. Torch's own kernels, which do neither, stand at the head of the chain only: lengths,
angles and embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from astrai_core.attn.backends import HEAD_DIMS
from astrai_core.attn.cache import MAX_PAGE_SIZE
from astrai_core.attn.step import FAMILY as ATTENTION
from astrai_core.policy import MAX_TOKENS, VARIABLES, OpSpec, kernel_for, observer

from ._arguments import Problem
from ._cache import Cache
from ._memory import extents_meet

__all__ = ["KERNELS", "ComposedDecoder", "obstacle"]

KERNELS = {
    "gemv": ("bf16_gemv", "bf16_swiglu", "add_rms_norm"),
    ATTENTION: ("rotary_emb", "attn_paged_decode"),
}
"""The ops that a step calls, by family."""

_FAMILIES = {op: family for family, ops in KERNELS.items() for op in ops}


def obstacle(problem: Problem) -> str | None:
    """Why the kernels cannot decode this, or None."""
    c, cache = problem.config, problem.cache
    if problem.gpu < 0:
        return "the weights are not on a CUDA device"
    if c.dtype != torch.bfloat16:
        return f"{str(c.dtype).removeprefix('torch.')} weights: the kernels take bfloat16"
    if cache.batch > MAX_TOKENS:
        return f"{cache.batch} sequences: the kernels take 1 to {MAX_TOKENS}"
    if c.hd not in HEAD_DIMS:
        return f"hd = {c.hd}: the kernels take {', '.join(map(str, HEAD_DIMS))}"
    if c.d % 8:
        return f"d = {c.d} is not divisible by 8"
    reason = _obstacle_in_weights(problem) or _obstacle_in_cache(cache) or observer()
    if reason is not None:
        return reason
    return next((why for op in _FAMILIES if (why := _kernel(op, problem.gpu)[1])), None)


def _obstacle_in_weights(problem: Problem) -> str | None:
    weights = problem.weights
    tensors = [weights.embed, weights.final_norm, weights.lm_head]
    tensors += [x for layer in weights.layers for x in vars(layer).values()]
    for x in tensors:
        if type(x) is not Tensor:
            return f"a weight is a {type(x).__name__}"
        if x.dim() == 1 and not x.is_contiguous():
            return "the weight of a norm is not contiguous"
        if x.dim() == 2 and (x.stride(1) != 1 or x.stride(0) < x.shape[1]):
            return "the rows of a weight are not contiguous"
    for layer in weights.layers:
        if any(x.data_ptr() % 16 or x.stride(0) % 8 for x in (layer.up, layer.gate)):
            return "the rows of up or gate do not start on 16 bytes"
    return None


def _obstacle_in_cache(cache: Cache) -> str | None:
    size = cache.page_size
    if cache.table is not None and (size > MAX_PAGE_SIZE or size & (size - 1)):
        return f"page_size = {size}: the kernel takes powers of two up to {MAX_PAGE_SIZE}"
    for k, v in zip(cache.keys, cache.values, strict=True):
        if type(k) is not Tensor or type(v) is not Tensor:
            return "the cache is no plain tensor"
        strides = k.stride()
        if strides != v.stride():
            return "keys and values differ in their strides"
        if strides[-1] != 1 or any(stride % 8 for stride in strides[:-1]):
            return "the rows of the cache are not contiguous, or do not start on 16 bytes"
        if (k.data_ptr() | v.data_ptr()) % 16:
            return "the cache does not start on 16 bytes"
        if extents_meet(k, v):
            return "keys and values lie between each other"
    return None


def _kernel(op: str, gpu: int) -> tuple[Callable[..., Any] | None, str | None]:
    spec = OpSpec("decode", _FAMILIES[op], op, VARIABLES["decode"][0])
    return kernel_for(spec, gpu)


class _Layer(NamedTuple):
    in_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    up: Tensor
    gate: Tensor
    down: Tensor


class _Pages(NamedTuple):
    """Sequences that one call of attention serves, and where their tokens are.

    Attributes:
        sequences: which ones.
        table: ``[sequences, pages]``, int32.
        pools: K and V of each layer, ``[pages, page_size, n_kv, hd]``.
        page_size: tokens of a page.
    """

    sequences: slice
    table: Tensor
    pools: list[tuple[Tensor, Tensor]]
    page_size: int


class ComposedDecoder:
    """A step as a chain of kernels, captured once; for a `Problem` without an `obstacle`.

    Holds a copy of the weights of q, k and v, which are one matrix here.
    """

    def __init__(self, problem: Problem) -> None:
        c, device, batch = problem.config, problem.device, problem.cache.batch
        self._config, self._weights, self._batch = c, problem.weights, batch
        self._op: dict[str, Any] = {name: _kernel(name, problem.gpu)[0] for name in _FAMILIES}
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [
                _Layer(
                    layer.in_norm,
                    torch.cat((layer.q, layer.k, layer.v)),
                    layer.o,
                    layer.post_norm,
                    layer.up,
                    layer.gate,
                    layer.down,
                )
                for layer in problem.weights.layers
            ]
            self._pages = _pages_of(problem)
            self._angles = c.angles(problem.max_seq_len, device)
            self._token_ids = torch.zeros(batch, dtype=torch.int64, device=device)
            self._pos = torch.zeros(batch, dtype=torch.int64, device=device)
            self._lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self._x = torch.zeros(batch, c.d, dtype=c.dtype, device=device)
            self._zeros = torch.zeros_like(self._x)
            self._turns = torch.zeros(batch, c.hd, dtype=torch.float32, device=device)
            self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
            if device.type == "cuda":
                self._capture(device)

    @torch.no_grad()
    def step(self, token_ids: Tensor, pos: int | Tensor) -> Tensor:
        """Logits ``[B, vocab]`` of the tokens after these."""
        self._token_ids.copy_(token_ids)
        if isinstance(pos, int):
            self._pos.fill_(pos)
        else:
            self._pos.copy_(pos)
        if self._captured is None or torch.cuda.is_current_stream_capturing():
            return self._run()
        graph, logits = self._captured
        graph.replay()
        return logits.clone()

    def close(self) -> None:
        """Gives the graph's memory back."""
        if self._captured is not None:
            self._captured[0].reset()

    def tensors(self) -> list[Tensor]:
        """What was allocated here; of the graph's own memory, the logits.

        They stand for all of it: nobody else gets memory of a graph's pool before the allocator
        has waited for the streams of every tensor that was freed. A graph that is dropped while it
        runs is freed by the driver once it has run.
        """
        tables = [pages.table for pages in self._pages]
        inputs = [self._token_ids, self._pos, self._lengths, self._x, self._zeros, self._turns]
        found = [self._angles, *inputs, *tables, *(layer.qkv for layer in self._layers)]
        return found if self._captured is None else [*found, self._captured[1]]

    def _capture(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Loads every kernel, which no capture may. Sequences without a token append none.
                self._head()
                self._lengths.zero_()
                # The chain reads lengths before the kernels in flight have ended.
                stream.synchronize()
                self._chain()
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on allocating.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                logits = self._run()
        self._captured = graph, logits

    def _run(self) -> Tensor:
        self._head()
        return self._chain()

    def _head(self) -> None:
        # `index_select` knows no negative index: an id or a position that is out of range is an
        # assertion of the device. Even without one only a sequence's own pages would be written:
        # the kernel clamps lengths to 0 and to what its table holds.
        # Lengths first: attention reads them while the kernels in flight may still run, of which
        # the last of these is one. It has waited for those before it.
        torch.add(self._pos, 1, out=self._lengths)
        torch.index_select(self._angles, 0, self._pos, out=self._turns)
        torch.index_select(self._weights.embed, 0, self._token_ids, out=self._x)

    def _chain(self) -> Tensor:
        c, batch = self._config, self._batch
        gemv, norm, swiglu, rotary = (
            self._op[name] for name in ("bf16_gemv", "add_rms_norm", "bf16_swiglu", "rotary_emb")
        )
        cos, sin = self._turns[:, None].chunk(2, -1)
        x, residual = self._x, self._zeros
        for number, layer in enumerate(self._layers):
            h, residual = norm(x, residual, layer.in_norm, c.eps, static_weights=True)
            heads = gemv(h, layer.qkv, static_weights=True).view(batch, 1, -1, c.hd)
            q_and_k = heads[:, :, : c.n_q + c.n_kv]
            rotary(q_and_k, cos, sin, interleaved=False, out=q_and_k)
            x = gemv(self._attend(number, heads), layer.o, static_weights=True)
            h, residual = norm(x, residual, layer.post_norm, c.eps, static_weights=True)
            h = swiglu(h, layer.up, layer.gate, static_weights=True)
            x = gemv(h, layer.down, static_weights=True)
        h, _ = norm(x, residual, self._weights.final_norm, c.eps, static_weights=True)
        logits: Tensor = gemv(h, self._weights.lm_head, static_weights=True)
        return logits

    def _attend(self, number: int, heads: Tensor) -> Tensor:
        """Appends the new keys and values; ``[B, n_q * hd]``."""
        c = self._config
        q, k, v = heads.split((c.n_q, c.n_kv, c.n_kv), 2)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for sequences, table, pools, size in self._pages:
            self._op["attn_paged_decode"](
                q[sequences],
                *pools[number],
                table,
                self._lengths[sequences],
                page_size=size,
                new_k=k[sequences],
                new_v=v[sequences],
                static_cache=True,
                out=out[sequences],
            )
        return out.view(self._batch, -1)


def _pages_of(problem: Problem) -> list[_Pages]:
    cache, batch = problem.cache, problem.cache.batch
    if cache.table is not None:
        pairs = zip(cache.keys, cache.values, strict=True)
        pools = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pairs]
        return [_Pages(slice(0, batch), cache.table, pools, cache.page_size)]
    # A sequence of a contiguous cache is a pool whose pages stand in order. Those of all sequences
    # are none: from one sequence's last page to the next sequence's first is another distance.
    size = next(s for s in (256, 128, 64, 32, 16, 8, 4, 2, 1) if cache.page_size % s == 0)
    pages = -(-problem.max_seq_len // size)
    table = torch.arange(pages, dtype=torch.int32, device=problem.device)[None]
    found = []
    for b in range(batch):
        pools = []
        for pair in zip(cache.keys, cache.values, strict=True):
            k, v = (x[b].unflatten(1, (-1, size)).permute(1, 2, 0, 3) for x in pair)
            pools.append((k, v))
        found.append(_Pages(slice(b, b + 1), table, pools, size))
    return found
