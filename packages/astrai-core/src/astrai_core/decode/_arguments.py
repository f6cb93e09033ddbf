# SPDX-License-Identifier: Apache-2.0
"""The arguments of `build_model`, checked, and in one form for every implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._config import Config, positive, require

__all__ = ["Cache", "Layer", "Problem", "Weights"]


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, each applied as ``h @ W.T``."""

    in_norm: Tensor
    post_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """Weights of a model; `lm_head` is `embed` where they are tied."""

    embed: Tensor
    final_norm: Tensor
    lm_head: Tensor
    layers: tuple[Layer, ...]

    @classmethod
    def parse(cls, weights: Mapping[str, Any], config: Config) -> Weights:
        """Reads the `weights` of the contract.

        Raises:
            ValueError: a key is missing, or a tensor has another shape or device.
            TypeError: a value that is no tensor, or one of another dtype.
        """
        c = config
        keys = (
            ("embed", "final_norm", "layers")
            if c.tied
            else ("embed", "final_norm", "layers", "lm_head")
        )
        require("weights", weights, keys)
        layers = weights["layers"]
        if not isinstance(layers, Sequence) or len(layers) != c.layers:
            found = len(layers) if isinstance(layers, Sequence) else type(layers).__name__
            raise ValueError(f"weights['layers']: expected a list of {c.layers} dicts, got {found}")
        embed = tensor("weights['embed']", weights["embed"], (c.vocab, c.d), c.dtype)
        place = embed.device
        norm = tensor("weights['final_norm']", weights["final_norm"], (c.d,), c.dtype, place)
        head = embed
        if not c.tied:
            head = tensor("weights['lm_head']", weights["lm_head"], (c.vocab, c.d), c.dtype, place)
        q, kv = c.n_q * c.hd, c.n_kv * c.hd
        shapes = {
            "in_norm": (c.d,),
            "post_norm": (c.d,),
            "q": (q, c.d),
            "k": (kv, c.d),
            "v": (kv, c.d),
            "o": (c.d, q),
            "gate": (c.ffn, c.d),
            "up": (c.ffn, c.d),
            "down": (c.d, c.ffn),
        }
        parsed = []
        for number, layer in enumerate(layers):
            where = f"weights['layers'][{number}]"
            require(where, layer, tuple(shapes))
            parsed.append(
                Layer(
                    **{
                        key: tensor(f"{where}[{key!r}]", layer[key], shape, c.dtype, place)
                        for key, shape in shapes.items()
                    }
                )
            )
        return cls(embed, norm, head, tuple(parsed))


@dataclass(frozen=True)
class Cache:
    """Keys and values of all layers.

    Attributes:
        keys: of each layer, ``[pages, n_kv, page_size, hd]``.
        values: likewise.
        table: ``[B, pages of a sequence]``, int32: the pages of `max_seq_len` tokens. None where
            the cache is contiguous: then sequence b is page b, of all its tokens.
        page_size: tokens of a page.
        batch: sequences.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: Tensor | None
    page_size: int
    batch: int

    @classmethod
    def parse(
        cls, kv_cache: Any, cfg: Mapping[str, Any], config: Config, max_seq_len: int
    ) -> Cache:
        """Reads the `kv_cache` of the contract.

        Raises:
            ValueError: a key is missing, a tensor has another shape or device, the table names a
                page that is not there, or `max_seq_len` tokens do not fit.
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
        if len(pairs) != c.layers or not all(
            isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(f"kv_cache: expected {c.layers} pairs (k, v), got {len(pairs)} items")
        first = tensor("kv_cache[0][0]", pairs[0][0], (None, c.n_kv, None, c.hd), c.dtype)
        batch, _, length, _ = shape = tuple(first.shape)
        found = [
            [
                tensor(f"kv_cache[{number}][{side}]", x, shape, c.dtype, first.device)
                for side, x in enumerate(pair)
            ]
            for number, pair in enumerate(pairs)
        ]
        _check_capacity(max_seq_len, batch, length)
        keys, values = zip(*found, strict=True)
        return cls(keys, values, None, length, batch)

    @classmethod
    def _paged(
        cls, pools: Mapping[str, Any], cfg: Mapping[str, Any], c: Config, max_seq_len: int
    ) -> Cache:
        require("kv_cache", pools, ("k", "v", "page_table", "page_size"))
        size = positive("kv_cache['page_size']", pools["page_size"])
        if cfg.get("page_size", size) != size:
            raise ValueError(
                f"kv_cache['page_size']: expected that of cfg, {cfg['page_size']}, got {size}"
            )
        for side in ("k", "v"):
            if not isinstance(pools[side], Sequence) or len(pools[side]) != c.layers:
                raise ValueError(f"kv_cache[{side!r}]: expected a list of {c.layers} tensors")
        page = (c.n_kv, size, c.hd)
        first = tensor("kv_cache['k'][0]", pools["k"][0], (None, *page), c.dtype)
        shape, place = (first.shape[0], *page), first.device
        keys, values = (
            tuple(
                tensor(f"kv_cache[{side!r}][{number}]", x, shape, c.dtype, place)
                for number, x in enumerate(pools[side])
            )
            for side in ("k", "v")
        )
        table = tensor(
            "kv_cache['page_table']", pools["page_table"], (None, None), torch.int32, place
        )
        batch, columns = table.shape
        _check_capacity(max_seq_len, batch, columns * size)
        # What is past the last token need not name a page.
        table = table[:, : -(-max_seq_len // size)]
        low, high = (int(page) for page in table.aminmax())
        if low < 0 or high >= shape[0]:
            raise ValueError(
                f"kv_cache['page_table']: expected pages 0 to {shape[0] - 1}, got {low} to {high}"
            )
        return cls(keys, values, table, size, batch)


@dataclass(frozen=True)
class Problem:
    """What a handle is to decode."""

    weights: Weights
    cache: Cache
    config: Config
    max_seq_len: int

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.weights.embed.device

    @property
    def gpu(self) -> int:
        """Index of its CUDA device, -1 on another device."""
        return self.weights.embed.get_device() if self.weights.embed.is_cuda else -1

    @classmethod
    def parse(
        cls, weights: Mapping[str, Any], kv_cache: Any, cfg: Mapping[str, Any], max_seq_len: int
    ) -> Problem:
        """Reads the arguments of `build_model`.

        Raises:
            ValueError: a key is missing, or a value does not fit.
            TypeError: a value of another type or dtype.
        """
        config = Config.parse(cfg)
        positive("max_seq_len", max_seq_len)
        parsed = Weights.parse(weights, config)
        cache = Cache.parse(kv_cache, cfg, config, max_seq_len)
        if cache.keys[0].device != parsed.embed.device:
            raise ValueError(
                f"kv_cache: expected the weights' device {parsed.embed.device}, got "
                f"{cache.keys[0].device}"
            )
        return cls(parsed, cache, config, max_seq_len)


def tensor(
    name: str,
    value: Any,
    shape: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """A tensor of a shape, where None stands for any size; without its autograd graph.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    fits = value.dim() == len(shape) and all(
        want in (None, size) for size, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got {[*value.shape]}")
    if value.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got {value.device}")
    return value.detach()


def _check_capacity(max_seq_len: int, batch: int, capacity: int) -> None:
    if batch < 1:
        raise ValueError("kv_cache: expected at least one sequence, got none")
    if max_seq_len > capacity:
        raise ValueError(
            f"max_seq_len: expected at most the {capacity} tokens that kv_cache holds, got "
            f"{max_seq_len}"
        )
