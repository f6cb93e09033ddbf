# SPDX-License-Identifier: Apache-2.0
"""The arguments of `build_model`, checked, and in one form for every implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._cache import Cache
from ._checks import positive, require, tensor
from ._config import Config

__all__ = ["Layer", "Problem", "Weights"]


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
