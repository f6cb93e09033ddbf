# SPDX-License-Identifier: Apache-2.0
"""A right decode step over pages, which the solutions here start from; no solution by itself.

It computes in fp32 and waits for nothing, so that a CUDA graph can hold it.
"""

import math

import torch
import torch.nn.functional as F


class Decoder:
    def __init__(self, weights, kv_cache, cfg, max_seq_len):
        self.weights, self.cache, self.cfg = weights, kv_cache, cfg
        device = weights["embed"].device
        self.table = kv_cache["page_table"].long()
        self.rows = torch.arange(self.table.shape[0], device=device)
        tokens = self.table.shape[1] * kv_cache["page_size"]
        assert tokens >= max_seq_len
        self.index = torch.arange(tokens, device=device)
        half = torch.arange(cfg["hd"] // 2, device=device)
        self.frequencies = cfg["theta"] ** (-half / (cfg["hd"] // 2))

    def linear(self, x, weight):
        return x @ weight.float().T

    def norm(self, x, gain):
        return F.rms_norm(x, x.shape[-1:], gain.float(), self.cfg["eps"])

    def rope(self, x, at):
        angles = at[:, None, None] * self.frequencies
        low, high = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def append(self, pool, pages, slots, row):
        pool[pages, :, slots] = row.to(pool.dtype)

    def gather(self, pool):
        """(B, n_kv, tokens, hd), fp32."""
        return pool[self.table].transpose(1, 2).flatten(2, 3).float()

    def values(self, pool, seen):
        # Not only their weights are 0: what lies there may be NaN.
        return self.gather(pool).masked_fill(~seen[..., None], 0)

    def attention(self, layer, q, at):
        batch, hd = at.shape[0], self.cfg["hd"]
        seen = (self.index <= at[:, None])[:, None]
        groups = q.view(batch, self.cfg["n_kv"], -1, hd)
        scores = groups @ self.gather(self.cache["k"][layer]).transpose(2, 3) / math.sqrt(hd)
        weights = scores.masked_fill(~seen[:, :, None], -math.inf).softmax(dim=-1)
        return (weights @ self.values(self.cache["v"][layer], seen)).view(batch, -1)

    def step(self, tokens, pos):
        """Logits (B, vocab), fp32; `pos` is an int or a tensor (B,)."""
        at = self.rows.new_full(tokens.shape, pos) if isinstance(pos, int) else pos
        pages = self.table[self.rows, at // self.cache["page_size"]]
        slots = at % self.cache["page_size"]
        x = self.weights["embed"][tokens].float()
        for i, layer in enumerate(self.weights["layers"]):
            h = self.norm(x, layer["in_norm"])
            q, k, v = (
                self.linear(h, layer[name]).view(len(tokens), -1, self.cfg["hd"]) for name in "qkv"
            )
            self.append(self.cache["k"][i], pages, slots, self.rope(k, at))
            self.append(self.cache["v"][i], pages, slots, v)
            x = x + self.linear(self.attention(i, self.rope(q, at), at), layer["o"])
            h = self.norm(x, layer["post_norm"])
            h = F.silu(self.linear(h, layer["gate"])) * self.linear(h, layer["up"])
            x = x + self.linear(h, layer["down"])
        return self.linear(self.norm(x, self.weights["final_norm"]), self.weights["embed"])


def build_model(weights, kv_cache, cfg, max_seq_len):
    return Decoder(weights, kv_cache, cfg, max_seq_len)


def decode_step(handle, token_ids, pos):
    return handle.step(token_ids, pos)
