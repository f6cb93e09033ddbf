# SPDX-License-Identifier: Apache-2.0
"""On a GPU, with the attention family installed: passes over a cache, and padded models."""

from __future__ import annotations

import pytest
import torch
from test_attention_parity import randn
from tiny_llama import llama, rows
from torch import Tensor

import astrai_core
from astrai_core import PagedKVCache, attention, attn_backend
from astrai_core.integrations.transformers import register_attention

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64


def passes(cache: PagedKVCache) -> list[Tensor]:
    """What queries see of a prompt, of tokens after it, and of forks that go on by themselves."""
    found = []

    def attend(seqs: list[int], counts: list[int]) -> None:
        step = cache.begin_step(seqs, counts)
        for layer in range(LAYERS):
            q, k, v = (
                randn(1, sum(counts), heads, DIM, seed=len(found) * 3 + i).to(cache.device)
                for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
            )
            fwd = "decode" if max(counts) == 1 else "prefill"
            found.append(attention(q, k, v, step, layer, is_causal=True, fwd=fwd))

    a, b = cache.new_sequence(), cache.new_sequence()
    attend([a, b], [37, 5])
    c = cache.fork(a)
    for _ in range(2):
        attend([a, b, c], [1, 1, 1])
    attend([c, a], [9, 1])
    cache.free(b)
    d = cache.new_sequence()
    attend([d, c], [3, 70])
    attend([c, d], [1, 1])
    return found + [x for seq in (a, c, d) for x in cache.gather(1, seq)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 256])
def test_passes_over_a_cache_are_torchs(page_size: int, layout: str) -> None:
    results = []
    for backend in ("cuda", "torch_native"):
        cache = PagedKVCache(
            LAYERS, 400 // page_size + 8, page_size, KV_HEADS, DIM, device="cuda", layout=layout
        )
        for layer in range(LAYERS):
            for pool in cache.pools(layer):
                pool.fill_(torch.nan)
        with torch.no_grad(), attn_backend(backend):
            results.append(passes(cache))
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs, atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("length", "begins"), [(7, (3, 0)), (150, (0, 70, 149))])
def test_a_padded_sequence_is_the_one_without_its_padding(
    length: int, begins: tuple[int, ...]
) -> None:
    """In prefill, and in the decoding step after it.

    Of these weights bf16 costs 0.8 % of the largest logit; of larger ones, whose softmax is sharp,
    12 %. A single key too many or too few costs a short sequence 26 % or more.
    """
    register_attention()
    model = llama("astrai", BF16, initializer_range=0.05).cuda()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (len(begins), length + 1), generator=generator).cuda()
    mask = (torch.arange(length + 1) >= torch.tensor(begins)[:, None]).long().cuda()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode(), astrai_core.explain() as report:
        cache, pieces = None, []
        for some in (slice(length), slice(length, None)):
            out = model(
                input_ids=ids[:, some],
                attention_mask=mask[:, : some.stop],
                position_ids=positions[:, some],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            pieces.append(out.logits)
    assert {row.chosen for row in rows(report)} == {"cuda"}
    for index, begin in enumerate(begins):
        with torch.inference_mode():
            alone = model(input_ids=ids[index : index + 1, begin:]).logits[0]
        found = torch.cat(pieces, 1)[index, begin:]
        error = (found - alone).float().abs().max() / alone.float().abs().max()
        assert error < 3e-2
