# SPDX-License-Identifier: Apache-2.0
"""Operands of attention that do not fit: an error that names them, and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from astrai_core import PagedKVCache, attention
from astrai_core.attn import Step


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


Q, K = ones(2, 3, 4, 64), ones(2, 3, 2, 64)
MASK = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": Q[:1, :2]}, r"q: expected \[1, 3, heads, head_dim\]"),
        ({"q": Q[:1].float()}, "q: expected torch.bfloat16 as k has it, got torch.float32"),
        ({"k": K[:1].float(), "v": K[:1].float()}, "k: expected torch.bfloat16 on cpu as the"),
        ({"v": K[:1].half()}, "v: expected torch.bfloat16 on cpu as the cache has it"),
        ({"q": Q[:1].to("meta")}, "q: expected on cpu as k is, got on meta"),
        ({"attn_mask": MASK.to("meta")}, "attn_mask: expected on cpu as k is, got on meta"),
        ({"attn_mask": MASK.int()}, "attn_mask: expected bool of shape"),
    ],
)
def test_nothing_is_stored_of_operands_that_do_not_fit(
    changes: dict[str, Tensor], words: str
) -> None:
    cache = PagedKVCache(1, 8, 4, 2, 64, device="cpu")
    seq = cache.new_sequence()
    step = cache.begin_step([seq], 3)
    attention(Q[:1], K[:1], K[:1], step)
    call: Any = {"q": Q[:1], "k": 2 * K[:1], "v": 2 * K[:1], "kv_cache": step} | changes
    with pytest.raises(ValueError, match=f"^{words}"):
        attention(**call)
    for stored in cache.gather(0, seq):
        assert torch.equal(stored, K[0])


def test_nothing_is_stored_of_a_dtype_that_is_none() -> None:
    cache = PagedKVCache(1, 8, 4, 2, 64, device="cpu", dtype=torch.int32)
    cache.pools(0)[0].zero_()
    seq = cache.new_sequence()
    step = cache.begin_step([seq], 3)
    with pytest.raises(ValueError, match=r"^k: expected one of torch.float64, .* got torch.int32"):
        attention(Q[:1].int(), K[:1].int(), K[:1].int(), step)
    assert not cache.gather(0, seq)[0].any()


@pytest.mark.parametrize("given", [PagedKVCache(1, 8, 4, 2, 64, device="cpu"), (K, K), 0])
def test_a_cache_is_no_step(given: Any) -> None:
    found = type(given).__name__
    words = rf"^kv_cache: pass what PagedKVCache.begin_step\(\) returns, got {found}$"
    with pytest.raises(TypeError, match=words):
        attention(Q, K, K, kv_cache=given)


def test_autocast_may_join_dtypes() -> None:
    cache = PagedKVCache(1, 8, 4, 2, 64, device="cpu")
    step = cache.begin_step([cache.new_sequence()], 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(Q.float(), K, K.float()).dtype is torch.bfloat16
        assert attention(Q[:1].float(), K[:1], K[:1], step).dtype is torch.bfloat16
        with pytest.raises(ValueError, match=r"^q: expected torch.bfloat16 as k has it, got"):
            attention(Q.double(), K, K)


def test_flags_that_are_numbers() -> None:
    q = torch.randn(1, 3, 2, 8)
    for flag in (0, 1):
        found = attention(q, q, q, is_causal=flag)  # type: ignore[arg-type]
        assert torch.equal(found, attention(q, q, q, is_causal=bool(flag)))


def a_step() -> Step:
    cache = PagedKVCache(1, 8, 4, 2, 64, device="cpu")
    return cache.begin_step([cache.new_sequence(), cache.new_sequence()], [3, 1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: attention(Q[0], K, K), r"q: expected \[batch, length, heads, head_dim\], got"),
        (lambda: attention(Q, K, K[:1]), r"v: expected k's shape \[2, 3, 2, 64\], got \[1, 3"),
        (lambda: attention(Q, K[..., :8], K[..., :8]), "k: expected head_dim 64 .* got 8"),
        (lambda: attention(Q[:, :, :3], K, K), "k: expected a divisor of q's 3 heads, got 2"),
        (lambda: attention(Q, K[:1], K[:1]), "k: expected batch 2 as q has it, got 1"),
        (lambda: attention(Q, K, K, fwd="decode"), "fwd: 'decode' is for one query a sequence, g"),
        (
            lambda: attention(Q.half(), K, K),
            "q: expected torch.bfloat16 as k has it, got torch.flo",
        ),
        (
            lambda: attention(Q, K, K.half()),
            "v: expected torch.bfloat16 as k has it, got torch.flo",
        ),
        (lambda: attention(Q, K, K.to("meta")), "v: expected on cpu as k is, got on meta"),
        (lambda: attention(Q, K, K, attn_mask=ones(2, 3)), "attn_mask: expected bool of shape"),
        (
            lambda: attention(Q, K, K, attn_mask=ones(2, 4).bool()),
            r"attn_mask: .* \[2, 3\], \[2, 3, 3\], \[2, 1, 3, 3\], got torch.bool \[2, 4\]",
        ),
        (lambda: attention(Q, K, K, a_step()), r"k: expected \[1, 4, heads, head_dim\] or"),
        (
            lambda: attention(Q, K[:1, [0, 1, 2, 0]], K[:1, [0, 1, 2, 0]], a_step()),
            r"q: expected \[1, 4, heads, head_dim\] or",
        ),
    ],
)
def test_operands_that_do_not_fit(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        call()
