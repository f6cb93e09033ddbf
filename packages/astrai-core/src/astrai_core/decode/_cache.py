# SPDX-License-Identifier: Apache-2.0
"""The `kv_cache` of `build_model`, checked, and in one form for every implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._checks import positive, require, tensor
from ._config import Config
from ._memory import extent, is_distinct, share

__all__ = ["Cache"]


@dataclass(frozen=True)
class Cache:
    """Keys and values of all layers.

    Attributes:
        keys: of each layer, ``[pages, n_kv, page_size, hd]``.
        values: likewise.
        table: ``[B, pages of a sequence]``, int32: the pages of `max_seq_len` tokens, a copy. None
            where the cache is contiguous: then sequence b is page b, of all its tokens.
        page_size: tokens of a page.
        batch: sequences.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: Tensor | None
    page_size: int
    batch: int

    @property
    def is_inference(self) -> bool:
        """Whether writing to it needs inference mode."""
        return any(pool.is_inference() for pool in (*self.keys, *self.values))

    @classmethod
    def parse(
        cls, kv_cache: Any, cfg: Mapping[str, Any], config: Config, max_seq_len: int
    ) -> Cache:
        """Reads the `kv_cache` of the contract.

        Raises:
            ValueError: a key is missing; a tensor has another shape, device or layout, shares
                memory with another one, or is an inference tensor outside of inference mode; the
                table names a page that is not there, or one twice for a sequence; `max_seq_len`
                tokens do not fit.
            TypeError: a value that is no tensor, or one of another dtype.
        """
        if isinstance(kv_cache, Mapping):
            return cls._paged(kv_cache, cfg, config, max_seq_len)
        if isinstance(kv_cache, Sequence):
            return cls._contiguous(kv_cache, config, max_seq_len)
        raise TypeError(
            "kv_cache: expected a dict of page pools or a list of (k, v), got "
            f"{type(kv_cache).__name__}"
        )

    @classmethod
    def _contiguous(cls, pairs: Sequence[Any], c: Config, max_seq_len: int) -> Cache:
        if len(pairs) != c.layers:
            raise ValueError(f"kv_cache: expected {c.layers} pairs (k, v), got {len(pairs)}")
        for number, pair in enumerate(pairs):
            if not isinstance(pair, Sequence):
                found = type(pair).__name__
                raise TypeError(f"kv_cache[{number}]: expected a pair (k, v), got {found}")
            if len(pair) != 2:
                raise ValueError(f"kv_cache[{number}]: expected a pair (k, v), got {len(pair)}")
        named = {
            f"kv_cache[{number}][{side}]": x
            for side in (0, 1)
            for number, x in enumerate(pair[side] for pair in pairs)
        }
        pools = _pools(named, (None, c.n_kv, None, c.hd), c.dtype)
        batch, _, length, _ = pools[0].shape
        _check_capacity(max_seq_len, batch, length)
        return cls(pools[: c.layers], pools[c.layers :], None, length, batch)

    @classmethod
    def _paged(
        cls, pools: Mapping[str, Any], cfg: Mapping[str, Any], c: Config, max_seq_len: int
    ) -> Cache:
        require("kv_cache", pools, ("k", "v", "page_table", "page_size"))
        size = positive("kv_cache['page_size']", pools["page_size"])
        if "page_size" in cfg and positive("cfg['page_size']", cfg["page_size"]) != size:
            raise ValueError(
                f"kv_cache['page_size']: expected that of cfg, {cfg['page_size']}, got {size}"
            )
        named: dict[str, Any] = {}
        for side in ("k", "v"):
            name, found = f"kv_cache[{side!r}]", pools[side]
            if not isinstance(found, Sequence):
                kind = type(found).__name__
                raise TypeError(f"{name}: expected a list of {c.layers} tensors, got {kind}")
            if len(found) != c.layers:
                raise ValueError(f"{name}: expected a list of {c.layers} tensors, got {len(found)}")
            named |= {f"{name}[{number}]": x for number, x in enumerate(found)}
        both = _pools(named, (None, c.n_kv, size, c.hd), c.dtype)
        pages = both[0].shape[0]
        if pages == 0:
            raise ValueError("kv_cache['k'][0]: expected at least one page, got none")
        table = tensor(
            "kv_cache['page_table']", pools["page_table"], (None, None), torch.int32, both[0].device
        )
        batch, columns = table.shape
        _check_capacity(max_seq_len, batch, columns * size)
        # What is past the last token need not name a page.
        table = table[:, : -(-max_seq_len // size)]
        _check_table(table.cpu(), pages)
        # A copy: nobody but the handle can change it. Nor may it be an inference tensor, which the
        # handle could not use everywhere.
        with torch.inference_mode(False):
            table = table.clone(memory_format=torch.contiguous_format)
        return cls(both[: c.layers], both[c.layers :], table, size, batch)


def _pools(
    named: Mapping[str, Any], shape: tuple[int | None, ...], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Tensors of one shape and device that may be written to, each with memory of its own."""
    found: dict[str, Tensor] = {}
    place = None
    for name, value in named.items():
        x = found[name] = tensor(name, value, shape, dtype, place)
        shape, place = tuple(x.shape), x.device
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name}: expected a tensor that can be written to here, got an inference tensor "
                "outside of inference mode"
            )
        if not is_distinct(x):
            raise ValueError(
                f"{name}: expected memory of its own for each element, got strides {[*x.stride()]}"
            )
    for name, other in _shared(found):
        raise ValueError(f"{name}: expected memory of its own, got that of {other}")
    return tuple(found.values())


def _shared(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Names of tensors that have memory in common."""
    ordered = sorted((x.data_ptr(), name) for name, x in named.items() if x.numel())
    for index, (_, other) in enumerate(ordered):
        _, end = extent(named[other])
        for start, name in ordered[index + 1 :]:
            if start >= end:
                break
            if share(named[other], named[name]):
                yield name, other


def _check_table(table: Tensor, pages: int) -> None:
    """Checks a table on the CPU, ``[B, columns]``."""
    name = "kv_cache['page_table']"
    low, high = (int(page) for page in table.aminmax())
    if low < 0 or high >= pages:
        raise ValueError(f"{name}: expected pages 0 to {pages - 1}, got {low} to {high}")
    ordered = table.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).nonzero()
    if len(twice):
        row, at = twice[0].tolist()
        page = int(ordered[row, at])
        raise ValueError(f"{name}: expected different pages in a row, got {page} twice in {row}")


def _check_capacity(max_seq_len: int, batch: int, capacity: int) -> None:
    if batch < 1:
        raise ValueError("kv_cache: expected at least one sequence, got none")
    if max_seq_len > capacity:
        raise ValueError(
            f"max_seq_len: expected at most the {capacity} tokens that kv_cache holds, got "
            f"{max_seq_len}"
        )
