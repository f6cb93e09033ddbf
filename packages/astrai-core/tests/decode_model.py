# SPDX-License-Identifier: Apache-2.0
"""A small random model with a cache that holds tokens already, and its decoding in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import astrai_core
from astrai_core.decode import build_model, teardown

SIZES = {
    "layers": 2,
    "d": 64,
    "ffn": 96,
    "n_q": 4,
    "n_kv": 2,
    "hd": 32,
    "vocab": 100,
    "eps": 1e-5,
    "theta": 10000.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass
class Model:
    """Weights, cfg and the keys and values of earlier tokens.

    Attributes:
        past: tokens of each sequence that the cache holds.
        capacity: tokens that it may hold.
        k: of each layer, ``[B, n_kv, capacity, hd]``, NaN from `past` on.
        v: likewise.
    """

    past: list[int]
    capacity: int = 40
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.cfg = c = {**SIZES, "wdtype": NAMES[self.dtype], **self.changes}
        q, kv = c["n_q"] * c["hd"], c["n_kv"] * c["hd"]
        shapes = {"q": (q, c["d"]), "k": (kv, c["d"]), "v": (kv, c["d"]), "o": (c["d"], q)}
        shapes |= {"gate": (c["ffn"], c["d"]), "up": (c["ffn"], c["d"]), "down": (c["d"], c["ffn"])}
        norms = ("in_norm", "post_norm")
        self.weights: dict[str, Any] = {
            "embed": self.draw(c["vocab"], c["d"]),
            "final_norm": 1 + self.draw(c["d"], scale=0.1),
            "layers": [
                {name: self.draw(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
                | {name: 1 + self.draw(c["d"], scale=0.1) for name in norms}
                for _ in range(c["layers"])
            ],
        }
        if not c.get("tied", True):
            self.weights["lm_head"] = self.draw(c["vocab"], c["d"], scale=c["d"] ** -0.5)
        shape = (self.batch, c["n_kv"], self.capacity, c["hd"])
        self.k, self.v = ([self.draw(*shape) for _ in range(c["layers"])] for _ in range(2))
        for pool in (*self.k, *self.v):
            for b, past in enumerate(self.past):
                pool[b, :, past:] = torch.nan

    @property
    def batch(self) -> int:
        return len(self.past)

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=self.random) * scale
        return values.to(self.device, self.dtype)

    def tokens(self) -> Tensor:
        ids = torch.randint(self.cfg["vocab"], (self.batch,), generator=self.random)
        return ids.to(self.device)

    def contiguous(self) -> list[tuple[Tensor, Tensor]]:
        return [(k.clone(), v.clone()) for k, v in zip(self.k, self.v, strict=True)]

    def paged(self, page_size: int = 8) -> dict[str, Any]:
        """A pool twice as large as needed, its pages dealt at random; the others' are NaN."""
        c = self.cfg
        columns = -(-self.capacity // page_size)
        count = 2 * self.batch * columns
        pages = torch.randperm(count, generator=self.random)[: self.batch * columns]
        table = pages.view(self.batch, columns)
        pools: dict[str, Any] = {"k": [], "v": []}
        for name, logical in (("k", self.k), ("v", self.v)):
            for rows in logical:
                pool = torch.full((count, c["n_kv"], page_size, c["hd"]), torch.nan)
                padded = torch.nn.functional.pad(
                    rows.float().cpu(), (0, 0, 0, columns * page_size - self.capacity), value=0.0
                )
                pool[table] = padded.unflatten(2, (columns, page_size)).transpose(1, 2)
                pools[name].append(pool.to(self.device, self.dtype))
        return {**pools, "page_table": table.int().to(self.device), "page_size": page_size}

    def cache(self, kind: str, page_size: int = 8) -> Any:
        return self.contiguous() if kind == "contiguous" else self.paged(page_size)


def build(model: Model, cache: Any = None) -> Any:
    """A handle of the model, over a paged cache if none is given."""
    cache = model.paged() if cache is None else cache
    return build_model(model.weights, cache, model.cfg, model.capacity)


def reasons(model: Model, cache: Any = None) -> tuple[str, dict[str, str]]:
    """The implementation that is chosen, and why the others are not."""
    with astrai_core.explain() as report:
        teardown(build(model, cache))
    (row,) = report.rows
    return row.chosen, dict(row.passed_over)


def written(cache: Any, layer: int, side: int, b: int, pos: int) -> Tensor:
    """Where a cache of either kind has a token: ``[n_kv, hd]``, a view."""
    if isinstance(cache, list):
        page, pool = b, cache[layer][side]
    else:
        page = int(cache["page_table"][b, pos // cache["page_size"]])
        pool, pos = cache["kv"[side]][layer], pos % cache["page_size"]
    slot: Tensor = pool[page, :, pos]
    return slot


def copy_of(cache: Any) -> Any:
    """A copy of a cache of either kind, bit by bit."""
    if isinstance(cache, list):
        return [tuple(pool.clone() for pool in pair) for pair in cache]
    return {**cache, **{side: [pool.clone() for pool in cache[side]] for side in "kv"}}


def same_bits(a: Any, b: Any) -> bool:
    """Whether two caches of a kind hold the same, NaNs of the same bits included."""
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(pools(a), pools(b), strict=True))


def bits(x: Tensor) -> Tensor:
    """A view of the numbers' bits."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def take_back(cache: Any, before: Any, positions: list[int]) -> None:
    """Puts what a cache held before in the place of a new token of each sequence.

    The bits, and not another NaN: NaNs of a conversion differ from those of `fill_`.
    """
    for layer in range(len(pools(cache)) // 2):
        for side in (0, 1):
            for b, pos in enumerate(positions):
                new, old = (written(x, layer, side, b, pos) for x in (cache, before))
                assert new.isfinite().all()
                bits(new).copy_(bits(old))


def pools(cache: Any) -> list[Tensor]:
    """All tensors of keys and values of a cache of either kind."""
    if isinstance(cache, list):
        return [pool for pair in cache for pool in pair]
    return [*cache["k"], *cache["v"]]


class Exact:
    """The document's computation in float64, one sequence and one head at a time."""

    def __init__(self, model: Model) -> None:
        self.cfg, self.model = model.cfg, model
        layers = range(model.cfg["layers"])
        self.k, self.v = (
            [
                [list(logical[i][b].double().unbind(1)[:past]) for b, past in enumerate(model.past)]
                for i in layers
            ]
            for logical in (model.k, model.v)
        )

    def rates(self) -> Tensor:
        c = self.cfg
        exponent = torch.arange(0, c["hd"], 2, dtype=torch.float64) / c["hd"]
        rates = c["theta"] ** -exponent
        scaling = c.get("rope_scaling")
        if scaling is None:
            return rates
        length, low, high = (
            scaling[k]
            for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        scaled = []
        for rate in rates.tolist():
            wavelength = 2 * torch.pi / rate
            if wavelength < length / high:
                scaled.append(rate)
            elif wavelength > length / low:
                scaled.append(rate / scaling["factor"])
            else:
                smooth = (length / wavelength - low) / (high - low)
                scaled.append((1 - smooth) * rate / scaling["factor"] + smooth * rate)
        return torch.tensor(scaled, dtype=torch.float64)

    def turned(self, heads: Tensor, pos: int) -> Tensor:
        half = heads.shape[-1] // 2
        pairs = torch.complex(heads[..., :half], heads[..., half:])
        angle = pos * self.rates().to(heads.device)
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pairs.real, pairs.imag), -1)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight.double() * x / (x.square().mean() + self.cfg["eps"]).sqrt()

    def step(self, token_ids: Tensor, pos: list[int]) -> Tensor:
        rows = [self.row(b, int(token_ids[b]), pos[b]) for b in range(self.model.batch)]
        return torch.stack(rows)

    def row(self, b: int, token: int, pos: int) -> Tensor:
        c, w = self.cfg, self.model.weights
        x = w["embed"][token].double()
        for i, layer in enumerate(w["layers"]):
            h = self.norm(x, layer["in_norm"])
            q, k, v = ((layer[n].double() @ h).view(-1, c["hd"]) for n in "qkv")
            q, k = self.turned(q, pos), self.turned(k, pos)
            assert len(self.k[i][b]) == pos
            self.k[i][b].append(k)
            self.v[i][b].append(v)
            keys, values = torch.stack(self.k[i][b]), torch.stack(self.v[i][b])
            outputs = []
            for head in range(c["n_q"]):
                group = head * c["n_kv"] // c["n_q"]
                scores = (keys[:, group] @ q[head] / c["hd"] ** 0.5).softmax(0)
                outputs.append(scores @ values[:, group])
            x = x + layer["o"].double() @ torch.cat(outputs)
            h = self.norm(x, layer["post_norm"])
            gate = layer["gate"].double() @ h
            x = x + layer["down"].double() @ (gate * gate.sigmoid() * (layer["up"].double() @ h))
        head_weight = w.get("lm_head", w["embed"]) if not c.get("tied", True) else w["embed"]
        return head_weight.double() @ self.norm(x, w["final_norm"])


def relative(got: Tensor, exact: Tensor) -> float:
    """Root mean square error over that of the exact values."""
    return float((got.double() - exact).norm() / exact.norm())
