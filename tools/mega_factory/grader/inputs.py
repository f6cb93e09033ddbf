# SPDX-License-Identifier: Apache-2.0
"""What a solution is given, made alike in its process and in the grading process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def data_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not a copy: the caller keeps the tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def load(path: Path, name: str) -> ModuleType:
    """Imports a file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def plain_defaults() -> Iterator[None]:
    """Torch's own default dtype and device; a solution may have set others, which come back."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dicts, lists and tuples, with a path such as `weights.layers.0.q`."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{index}")


def pools_of(kv_cache: Any) -> dict[str, Tensor]:
    """The keys and values of a cache by path, each (n_pages, n_kv, page_size, hd).

    A contiguous cache, (B, n_kv, max_seq, hd), counts as one page per sequence.
    """
    return {path: x for path, x in tensors_in(kv_cache, "kv_cache") if x.dim() == 4}


def slot_mask(kv_cache: Any, first: list[int], stop: list[int]) -> Tensor:
    """Which slots hold positions `first[b]` to `stop[b] - 1` of any sequence b.

    Returns (n_pages, page_size) bool, on the cache's device.
    """
    pool = next(iter(pools_of(kv_cache).values()))
    mask = torch.zeros(pool.shape[0], pool.shape[2], dtype=torch.bool, device=pool.device)
    for b, (start, end) in enumerate(zip(first, stop, strict=True)):
        pages, slots = slots_of(kv_cache, b, torch.arange(start, end, device=pool.device))
        mask[pages, slots] = True
    return mask


def slots_of(kv_cache: Any, b: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Page and slot of positions (n,), int64, of sequence b: two int64 tensors of shape (n,)."""
    if isinstance(kv_cache, dict):
        size = kv_cache["page_size"]
        return kv_cache["page_table"][b].long()[positions // size], positions % size
    return torch.full_like(positions, b), positions


def written(kv_cache: Any, lens: list[int], pools: dict[str, Tensor] | None = None) -> list[Tensor]:
    """Views of the slots of the first `lens[b]` tokens of each sequence b, each contiguous.

    A copy between two of them needs no kernel, which one that runs on could keep from running.

    Args:
        kv_cache: says which page holds what.
        lens: tokens of each sequence.
        pools: as of `pools_of`, by default the cache's own.

    Returns:
        Tensors (up to page_size, hd): pool after pool, sequence after sequence, page after page,
        head after head; so they pair up with those of another cache with as many tokens.
    """
    pools = pools_of(kv_cache) if pools is None else pools
    first = next(iter(pools.values()))
    size = first.shape[2]
    spans: list[tuple[int, int]] = []
    for b, length in enumerate(lens):
        starts = torch.arange(0, length, size, device=first.device)
        pages, _ = slots_of(kv_cache, b, starts)
        spans += zip(pages.tolist(), (length - starts).clamp(max=size).tolist(), strict=True)
    return [head[:count] for pool in pools.values() for page, count in spans for head in pool[page]]


def make_inputs(
    reference: ModuleType, scale: dict[str, Any], run: dict[str, Any], device: str
) -> tuple[Any, Any, Any]:
    """Weights, KV cache and replacement of one run, the same in every process.

    Of what a solution must not read, other sequences' pages and slots without a token, half is NaN
    and half is random: what is read shows either way, even by a solution that leaves NaN out.

    Args:
        reference: the bundle's reference module.
        scale: of the bundle's spec.json.
        run: `weights_seed`, `cache_seed` and `rewrite_seed`.
        device: where to.

    Returns:
        Weights and cache, which the solution gets, and a cache with other tokens, which replace
        those of the first in the course of the run.
    """
    lens, max_seq, batch = scale["prefill_lens"], scale["max_seq"], scale["batch"]
    with plain_defaults():
        weights = reference.make_weights(scale["cfg"], run["weights_seed"], device)
        kv_cache, other = (
            reference.make_kv_cache(scale["cfg"], batch, lens, max_seq, run[seed], device)
            for seed in ("cache_seed", "rewrite_seed")
        )
        mask = poison_mask(kv_cache, scale, run["cache_seed"])
        for pool in pools_of(kv_cache).values():
            pool.masked_fill_(mask[:, None, :, None], torch.nan)
    return weights, kv_cache, other


def poison_mask(kv_cache: Any, scale: dict[str, Any], seed: int) -> Tensor:
    """Which slots are NaN: half of others' pages, and half of our slots without a token.

    Returns (n_pages, page_size) bool, on the cache's device.
    """
    generator = torch.Generator().manual_seed(seed)
    owned = owned_pages(kv_cache, scale)
    mask = slot_mask(kv_cache, [0] * scale["batch"], scale["prefill_lens"])
    unwritten = half((owned[:, None] & ~mask).nonzero(), generator)
    mask.zero_()
    mask[half((~owned).nonzero()[:, 0], generator)] = True
    mask[unwritten[:, 0], unwritten[:, 1]] = True
    return mask


def half(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the rows, rounded up, at random."""
    order = torch.randperm(len(rows), generator=generator).to(rows.device)
    return rows[order[: (len(rows) + 1) // 2]]


def owned_pages(kv_cache: Any, scale: dict[str, Any]) -> Tensor:
    """Which pages belong to the sequences that are decoded: (n_pages,) bool."""
    batch = scale["batch"]
    return slot_mask(kv_cache, [0] * batch, [scale["max_seq"]] * batch).any(dim=1)
