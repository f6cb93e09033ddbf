# SPDX-License-Identifier: Apache-2.0
"""What `cfg` says of a model, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._checks import number, positive, require

__all__ = ["DTYPES", "Config", "RopeScaling"]

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
_SIZES = ("layers", "d", "ffn", "n_q", "n_kv", "hd", "vocab")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotations, so that a model reads longer texts.

    Attributes:
        factor: what the slowest rotations are slowed down by.
        low_freq_factor: turns within the original context below which a rotation is slow.
        high_freq_factor: turns from which on a rotation is left alone; in between both are mixed.
        original_max_position_embeddings: tokens of the original context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def rates(self, rates: Tensor) -> Tensor:
        """The rates to use in place of the original ones, in radians per token."""
        turns = self.original_max_position_embeddings / (2 * math.pi / rates)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * rates / self.factor + kept * rates


@dataclass(frozen=True)
class Config:
    """A model of Llama's architecture.

    Attributes:
        layers: decoder layers.
        d: width of the residual stream.
        ffn: width of the gated MLP.
        n_q: query heads.
        n_kv: heads of keys and values.
        hd: elements of a head.
        vocab: tokens that there are.
        eps: added to the mean square of RMSNorm.
        theta: base of the rotary embedding.
        dtype: of weights, cache and logits.
        tied: whether the embedding is the head too.
        scaling: Llama 3's scaling of the rotary embedding, or None.
    """

    layers: int
    d: int
    ffn: int
    n_q: int
    n_kv: int
    hd: int
    vocab: int
    eps: float
    theta: float
    dtype: torch.dtype
    tied: bool
    scaling: RopeScaling | None

    @classmethod
    def parse(cls, cfg: Mapping[str, Any]) -> Config:
        """Reads a `cfg` of the contract.

        Raises:
            ValueError: a key is missing, or a value is out of range.
            TypeError: a value of another type.
        """
        require("cfg", cfg, (*_SIZES, "eps", "theta", "wdtype"))
        sizes = {key: positive(f"cfg[{key!r}]", cfg[key]) for key in _SIZES}
        if sizes["n_q"] % sizes["n_kv"]:
            raise ValueError(
                f"cfg['n_kv']: expected a divisor of n_q = {sizes['n_q']}, got {sizes['n_kv']}"
            )
        if sizes["hd"] % 2:
            raise ValueError(f"cfg['hd']: expected an even number, got {sizes['hd']}")
        eps, theta = (number(f"cfg[{key!r}]", cfg[key]) for key in ("eps", "theta"))
        if not eps >= 0 or not theta > 0:
            raise ValueError(f"cfg: expected eps >= 0 and theta > 0, got {eps} and {theta}")
        wdtype = str(cfg["wdtype"]).removeprefix("torch.")
        if wdtype not in DTYPES:
            raise ValueError(f"cfg['wdtype']: expected one of {', '.join(DTYPES)}, got {wdtype!r}")
        tied = cfg.get("tied", True)
        if not isinstance(tied, bool):
            raise TypeError(f"cfg['tied']: expected a bool, got {tied!r}")
        scaling = _scaling(cfg.get("rope_scaling"))
        return cls(**sizes, eps=eps, theta=theta, dtype=DTYPES[wdtype], tied=tied, scaling=scaling)

    def angles(self, length: int, device: torch.device) -> Tensor:
        """Cos, then sin, of each rotation at each position: ``[length, hd]``, fp32."""
        steps = torch.arange(0, self.hd, 2, dtype=torch.float32, device=device) / self.hd
        rates = 1.0 / self.theta**steps
        if self.scaling is not None:
            rates = self.scaling.rates(rates)
        angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * rates
        return torch.cat((angles.cos(), angles.sin()), -1)


def _scaling(value: Any) -> RopeScaling | None:
    if value is None:
        return None
    name = "cfg['rope_scaling']"
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dict or None, got {value!r}")
    kind = value.get("rope_type", "llama3")
    if kind != "llama3":
        raise ValueError(f"{name}: expected rope_type llama3, got {kind!r}")
    keys = tuple(RopeScaling.__dataclass_fields__)
    require(name, value, keys)
    scaling = RopeScaling(*(number(f"{name}[{key!r}]", value[key]) for key in keys))
    right = (
        min(scaling.factor, scaling.original_max_position_embeddings) > 0
        and scaling.high_freq_factor > scaling.low_freq_factor > 0
    )
    if not right:
        raise ValueError(
            f"{name}: expected factor > 0, original_max_position_embeddings > 0 and "
            f"high_freq_factor > low_freq_factor > 0, got {value}"
        )
    return scaling
