# SPDX-License-Identifier: Apache-2.0
"""On a GPU, with the attention family installed: passes over a cache, and padded models."""

from __future__ import annotations

import pytest
import torch
from test_attention_parity import randn
from tiny_llama import IDS, PADDED, llama, rows
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
@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
def test_passes_over_a_cache_are_torchs(page_size: int, layout: str) -> None:
    results = []
    for backend in ("cuda", "torch_native"):
        cache = PagedKVCache(
            LAYERS, 400 // page_size + 8, page_size, KV_HEADS, DIM, device="cuda", layout=layout
        )
        with torch.no_grad(), attn_backend(backend):
            results.append(passes(cache))
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs, atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore")
def test_a_padded_sequence_is_the_one_without_its_padding() -> None:
    """In prefill, and in the decoding step after it."""
    register_attention()
    model = llama("astrai", BF16).cuda()
    ids, mask = IDS.cuda(), PADDED.cuda()
    more, one = IDS[:, :1].cuda(), mask.new_ones(2, 1)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode(), astrai_core.explain() as report:
        out = model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=True)
        after = model(
            input_ids=more,
            attention_mask=torch.cat((mask, one), 1),
            position_ids=position_ids[:, -1:] + 1,
            past_key_values=out.past_key_values,
        )
    assert {row.chosen for row in rows(report)} == {"cuda"}
    for index, begin in enumerate((3, 0)):
        with torch.inference_mode():
            whole = torch.cat((ids[index : index + 1, begin:], more[index : index + 1]), 1)
            alone = model(input_ids=whole).logits[0]
        found = torch.cat((out.logits[index, begin:], after.logits[index]))
        error = (found - alone).float().abs().max() / alone.float().abs().max()
        assert error < 2e-2
