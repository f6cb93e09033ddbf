# SPDX-License-Identifier: Apache-2.0
"""Implementations of the tasks besides the references, and ones that drop a feature.

The tolerance of a task lies between their errors: what two correct implementations differ from the
reference by is its floor, what the closest wrong one differs by its ceiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

# The correct ones, and what each of the others does wrong.
CORRECT = {
    "fp32_residual": "bf16 GEMVs + fp32 residual stream, hand-rolled attention",
    "all_fp32": "all-fp32 twin: residual, GEMVs and softmax all in fp32",
}
DROPS = {
    "never_append": "never append this position's K/V",
    "ignore_table": "ignore the page table, read the pool contiguously",
    "wrong_length": "attend over the length of the neighbouring sequence",
    "wrong_kv_head": "share KV heads round-robin: query head h reads h % n_kv, not h // rep",
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst ||actual - expected|| / ||expected|| over rows (B, vocab), computed in fp32."""
    actual, expected = actual.float(), expected.float()
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@dataclass(frozen=True)
class Twin:
    """One decode step, with an fp32 residual stream and an attention that never rounds its scores.

    Pages, or pieces of a contiguous cache, are read as they lie, and KV heads are not expanded.

    Args:
        weights: as of the references' make_weights.
        kv_cache: paged or contiguous, appended to in place.
        cfg: the model's shape.
        full: every product in fp32; otherwise projections take and return bf16.
        drop: a key of DROPS, or None to be correct.
    """

    weights: dict[str, Any]
    kv_cache: Any
    cfg: dict[str, Any]
    full: bool
    drop: str | None = None

    def linear(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns h @ weight.T in fp32."""
        if self.full:
            return F.linear(h, weight.float())
        return F.linear(h.to(torch.bfloat16), weight).float()

    def rmsnorm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm: gain * x / sqrt(mean(x**2) + eps), fp32."""
        return F.rms_norm(x, (x.shape[-1],), gain.float(), self.cfg["eps"])

    def rope(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Rotates (B, heads, hd) to positions (B,), by complex numbers."""
        half = x.shape[-1] // 2
        exponents = torch.arange(half, device=x.device) / half
        angles = at[:, None, None].float() * self.cfg["theta"] ** -exponents
        pairs = torch.complex(x[..., :half], x[..., half:])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def pieces(self, layer: int, at: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor]:
        """Appends `new`, k and v of (B, n_kv, hd), at positions (B,); returns all keys and values.

        Those are (B, pieces, n_kv, tokens, hd), bf16, piece after piece.
        """
        rows = torch.arange(at.shape[0], device=at.device)
        if isinstance(self.kv_cache, dict):
            size, table = self.kv_cache["page_size"], self.kv_cache["page_table"].long()
            if self.drop == "ignore_table":
                table = torch.arange(table.numel(), device=table.device).view_as(table)
            stores = [self.kv_cache[name][layer] for name in "kv"]
        else:
            # One page per sequence.
            stores, table = list(self.kv_cache[layer]), rows[:, None]
            size = stores[0].shape[2]
        if self.drop != "never_append":
            for store, row in zip(stores, new, strict=True):
                store[table[rows, at // size], :, at % size] = row.to(store.dtype)
        return [store[table] for store in stores]

    def attention(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """softmax(q @ keys.T / sqrt(hd)) @ values over the first `lengths` (B,) tokens, fp32.

        q is (B, n_q, hd), keys and values are (B, pieces, n_kv, tokens, hd); returns (B, n_q*hd).
        """
        batch, pieces, n_kv, tokens, hd = keys.shape
        if self.drop == "wrong_kv_head":
            groups = q.view(batch, -1, n_kv, hd).transpose(1, 2)
        else:
            groups = q.view(batch, n_kv, -1, hd)
        scores = torch.einsum("bgrh,bpgth->bgrpt", groups, keys.float()) / math.sqrt(hd)
        index = torch.arange(pieces * tokens, device=q.device).view(pieces, tokens)
        unused = index >= lengths[:, None, None, None, None]
        scores = scores.masked_fill(unused, -math.inf)
        weights = torch.exp(scores - scores.amax(dim=(-2, -1), keepdim=True))
        summed = torch.einsum("bgrpt,bpgth->bgrh", weights, values.float())
        heads = summed / weights.sum(dim=(-2, -1))[..., None]
        if self.drop == "wrong_kv_head":
            heads = heads.transpose(1, 2)
        return heads.reshape(batch, -1)

    def decode_step(self, token_ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Logits (B, vocab), fp32, of tokens (B,) at positions (B,), both int64."""
        cfg, batch = self.cfg, token_ids.shape[0]
        lengths = (at.roll(1) if self.drop == "wrong_length" else at) + 1
        x = F.embedding(token_ids, self.weights["embed"]).float()
        for i, layer in enumerate(self.weights["layers"]):
            h = self.rmsnorm(x, layer["in_norm"])
            q, k, v = (self.linear(h, layer[name]).view(batch, -1, cfg["hd"]) for name in "qkv")
            q, k = self.rope(q, at), self.rope(k, at)
            keys, values = self.pieces(i, at, torch.stack([k, v]))
            x = x + self.linear(self.attention(q, keys, values, lengths), layer["o"])
            h = self.rmsnorm(x, layer["post_norm"])
            h = F.silu(self.linear(h, layer["gate"])) * self.linear(h, layer["up"])
            x = x + self.linear(h, layer["down"])
        head = self.weights.get("lm_head", self.weights["embed"])
        return self.linear(self.rmsnorm(x, self.weights["final_norm"]), head)
