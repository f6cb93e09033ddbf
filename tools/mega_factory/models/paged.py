# SPDX-License-Identifier: Apache-2.0
"""Reference: one decode step of a Llama in bf16 over a paged KV cache, unfused, in eager torch.

It is rounded to bf16 where a Llama in bf16 is: after every projection, norm, rotation, product and
residual sum. RMSNorm, rotation and softmax compute in fp32. Physical page ids are resolved on the
host, so that a step waits for the device and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

MODEL_SRC = Path(__file__).read_text("utf-8")

Cfg = dict[str, Any]

# Share of a head's query projection that is its key projection: a token attends to itself, as in a
# trained model. With independent ones the appended position would be one key among thousands.
SELF_ATTENTION = 0.9
# What a matrix that adds to the residual stream is scaled by, relative to the embedding. With more,
# every layer amplifies the rounding errors of those below it.
RESIDUAL = 0.75
# Tokens in a row whose cached keys, and values, share an offset, as those of one passage do. Values
# without it average out over a long context, and an attention that read others would go unseen.
PASSAGE = 64
VALUE_OFFSET = 2.0


def _generator(seed: int, stream: int, device: torch.device | str) -> torch.Generator:
    """Weights, cached tokens, the rest of the cache and page table: streams 0 to 3 of a seed."""
    return torch.Generator(device).manual_seed(4 * seed + stream)


def make_weights(cfg: Cfg, seed: int, device: torch.device | str) -> dict[str, Any]:
    """Random weights, bf16: matrices of standard deviation columns**-0.5, gains 1 +- 0.1.

    Those that add to the residual stream, `o` and `down`, are smaller by RESIDUAL * d**-0.5.

    Keys are `embed` (vocab, d), `final_norm` (d,), `layers`, a list of dicts of `in_norm` (d,),
    `post_norm` (d,), `q` (n_q*hd, d), `k` and `v` (n_kv*hd, d), `o` (d, n_q*hd), `gate` and `up`
    (ffn, d), `down` (d, ffn); and `lm_head` (vocab, d) if `cfg["tied"]` is there and false.
    """
    generator = _generator(seed, 0, device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return normal(rows, columns).mul_(columns**-0.5)

    def gain() -> torch.Tensor:
        return normal(cfg["d"]).mul_(0.1).add_(1)

    d, ffn, hd = cfg["d"], cfg["ffn"], cfg["hd"]
    n_q, n_kv = cfg["n_q"] * hd, cfg["n_kv"] * hd
    layers = []
    for _ in range(cfg["layers"]):
        layer = {"in_norm": gain(), "post_norm": gain()}
        layer["k"] = matrix(n_kv, d)
        own = layer["k"].view(cfg["n_kv"], 1, hd, d).expand(-1, cfg["n_q"] // cfg["n_kv"], -1, -1)
        other = matrix(n_q, d).mul_((1 - SELF_ATTENTION**2) ** 0.5)
        layer["q"] = other.add_(own.reshape(n_q, d), alpha=SELF_ATTENTION)
        layer["v"] = matrix(n_kv, d)
        layer["o"] = matrix(d, n_q).mul_(RESIDUAL * d**-0.5)
        layer["gate"], layer["up"] = matrix(ffn, d), matrix(ffn, d)
        layer["down"] = matrix(d, ffn).mul_(RESIDUAL * d**-0.5)
        layers.append(layer)
    weights = {"embed": matrix(cfg["vocab"], d), "final_norm": gain(), "layers": layers}
    if not cfg.get("tied", True):
        weights["lm_head"] = matrix(cfg["vocab"], d)
    return weights


def rope_tables(
    cfg: Cfg, length: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of pos * theta**(-2i/hd), each (length, hd/2), fp32."""
    exponents = torch.arange(0, cfg["hd"], 2, device=device, dtype=torch.float32) / cfg["hd"]
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * cfg["theta"] ** -exponents
    return angles.cos(), angles.sin()


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + hd/2) of the last dimension, in fp32; returns bf16."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(torch.bfloat16)


def cached_tokens(
    cfg: Cfg, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, rotated to their positions, and values of one layer: (n_kv, length, hd), bf16."""
    n_kv, hd, device = cfg["n_kv"], cfg["hd"], generator.device
    both = torch.randn(2, n_kv, length, hd, generator=generator, device=device)
    passages = math.ceil(length / PASSAGE)
    offsets = torch.randn(2, n_kv, passages, hd, generator=generator, device=device)
    offsets[1] *= VALUE_OFFSET
    both += offsets.repeat_interleave(PASSAGE, dim=2)[:, :, :length]
    return rope(both[0], *rope_tables(cfg, length, device)), both[1].to(torch.bfloat16)


def make_kv_cache(
    cfg: Cfg,
    batch: int,
    prefill_lens: list[int],
    max_seq: int,
    seed: int,
    device: torch.device | str,
) -> dict[str, Any]:
    """A pool of pages of which half, scattered, hold `prefill_lens[b]` tokens of each sequence.

    Returns a dict: `k` and `v`, per layer (n_pages, n_kv, page_size, hd) bf16; `page_table`
    (batch, ceil(max_seq/page_size)) int32; `page_size`. The rest of the pool is random. The tokens
    are those of the contiguous cache of the same seed.
    """
    page_size = cfg["page_size"]
    per_seq = math.ceil(max_seq / page_size)
    n_pages = 2 * batch * per_seq
    order = torch.randperm(n_pages, generator=_generator(seed, 3, "cpu"))
    table = order[: batch * per_seq].view(batch, per_seq)
    tokens, rest = _generator(seed, 1, device), _generator(seed, 2, device)
    shape = (n_pages, cfg["n_kv"], page_size, cfg["hd"])
    pools: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    for _ in range(cfg["layers"]):
        for pool in pools.values():
            offset = torch.randn(n_pages, cfg["n_kv"], 1, cfg["hd"], generator=rest, device=device)
            noise = torch.randn(shape, generator=rest, device=device)
            pool.append((noise + offset).to(torch.bfloat16))
        for b, length in enumerate(prefill_lens):
            for pool, x in zip(pools.values(), cached_tokens(cfg, length, tokens), strict=True):
                for j, page in enumerate(table[b, : math.ceil(length / page_size)].tolist()):
                    part = x[:, j * page_size : (j + 1) * page_size]
                    pool[-1][page, :, : part.shape[1]] = part
    return {**pools, "page_table": table.int().to(device), "page_size": page_size}


class Handle(NamedTuple):
    """What decode_step needs."""

    weights: dict[str, Any]
    kv_cache: dict[str, Any]
    cfg: Cfg
    cos: torch.Tensor
    sin: torch.Tensor


def build_model(
    weights: dict[str, Any], kv_cache: dict[str, Any], cfg: Cfg, max_seq_len: int
) -> Handle:
    """Keeps the arguments, and rotary tables for positions below `max_seq_len`."""
    cos, sin = rope_tables(cfg, max_seq_len, weights["embed"].device)
    return Handle(weights, kv_cache, cfg, cos, sin)


def rmsnorm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm: x / sqrt(mean(x**2) + eps) in fp32, rounded to bf16, times gain."""
    full = x.float()
    scale = torch.rsqrt(full.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (full * scale).to(torch.bfloat16) * gain


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """softmax(q @ keys.T / sqrt(hd)) @ values of one sequence, with KV heads expanded.

    q is (n_q, hd), keys and values are (n_kv, length, hd); returns (n_q, hd), all bf16.
    """
    rep = q.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(rep, dim=0), values.repeat_interleave(rep, dim=0)
    scores = (q[:, None] @ keys.transpose(1, 2)) * q.shape[-1] ** -0.5
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(torch.bfloat16)
    return torch.matmul(weights, values)[:, 0]


def append_and_gather(
    handle: Handle, layer: int, b: int, pos: int, new: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Writes k and v, (n_kv, hd) each, to position `pos` of sequence `b`; returns all up to it.

    Those are two contiguous copies, (n_kv, pos + 1, hd).
    """
    table, page_size = handle.kv_cache["page_table"], handle.kv_cache["page_size"]
    pages = table[b, : pos // page_size + 1].tolist()
    gathered = []
    for name, row in new.items():
        pool = handle.kv_cache[name][layer]
        pool[pages[-1], :, pos % page_size] = row
        gathered.append(torch.cat([pool[page] for page in pages], dim=1)[:, : pos + 1])
    return gathered


def decode_step(handle: Handle, token_ids: torch.Tensor, pos: int | torch.Tensor) -> torch.Tensor:
    """Logits (B, vocab), bf16, of one token per sequence; appends its keys and values to the pool.

    Args:
        handle: from build_model.
        token_ids: (B,), int64, on the device.
        pos: the position that is written: an int, or an int64 tensor of shape () or (B,).
    """
    cfg, weights = handle.cfg, handle.weights
    batch, device = token_ids.shape[0], token_ids.device
    if isinstance(pos, int):
        positions, at = [pos] * batch, torch.full((batch,), pos, device=device)
    else:
        at = pos.expand(batch)
        positions = at.tolist()
    cos, sin = handle.cos[at][:, None], handle.sin[at][:, None]
    x = F.embedding(token_ids, weights["embed"])
    for i, layer in enumerate(weights["layers"]):
        h = rmsnorm(x, layer["in_norm"], cfg["eps"])
        q, k, v = (F.linear(h, layer[name]).view(batch, -1, cfg["hd"]) for name in "qkv")
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        heads = [
            attention(q[b], *append_and_gather(handle, i, b, p, {"k": k[b], "v": v[b]}))
            for b, p in enumerate(positions)
        ]
        x = x + F.linear(torch.stack(heads).view(batch, -1), layer["o"])
        h = rmsnorm(x, layer["post_norm"], cfg["eps"])
        h = F.silu(F.linear(h, layer["gate"])) * F.linear(h, layer["up"])
        x = x + F.linear(h, layer["down"])
    head = weights.get("lm_head", weights["embed"])
    return F.linear(rmsnorm(x, weights["final_norm"], cfg["eps"]), head)
