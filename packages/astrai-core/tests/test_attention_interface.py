# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="astrai": its numbers are those of sdpa and eager, or sdpa computes them."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_llama import IDS, PADDED, SIZES, assert_close, llama, logits, rows
from torch import nn
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM
from transformers.cache_utils import StaticCache

import astrai_core
from astrai_core.integrations.transformers import _attention, patch, register_attention


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_attention()


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["sdpa", "eager"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_prefill(other, kv_heads):
    expected = logits(llama(other, num_key_value_heads=kv_heads))
    assert_close(logits(llama("astrai", num_key_value_heads=kv_heads)), expected)


@pytest.mark.parametrize("other", ["sdpa", "eager"])
@pytest.mark.parametrize("chunks", [(7,), (4, 3), (6, 1), (1, 1, 5)])
def test_prefill_in_pieces_and_decode(other, chunks):
    model = llama()
    expected = logits(llama(other))
    with patch(model), torch.inference_mode():
        cache, pieces = None, []
        for ids in IDS.split(list(chunks), 1):
            out = model(input_ids=ids, use_cache=True, cache=cache)
            cache = out.cache
            pieces.append(out.logits)
    assert_close(torch.cat(pieces, 1), expected)


@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_left_padding(other):
    position_ids = (PADDED.cumsum(-1) - 1).clamp(min=0)
    options = {"attention_mask": PADDED, "position_ids": position_ids}
    expected = logits(llama(other), **options)
    model = llama()
    with patch(model):
        got = logits(model, **options)
    assert_close(got[PADDED.bool()], expected[PADDED.bool()])
    # A padded sequence is the one without its padding.
    alone = logits(model, IDS[:1, 3:])
    assert_close(got[:1, 3:], alone)


@pytest.mark.parametrize("mask", [None, PADDED])
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_text(mask, cache):
    options = {
        "input_ids": IDS,
        "attention_mask": torch.ones_like(IDS) if mask is None else mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    model = llama()
    expected = model.generate(**options)
    with patch(model):
        got = model.generate(**options)
    assert torch.equal(got, expected)
    assert torch.equal(llama("eager").generate(**options), expected)


def test_rotary_is_as_exact_as_before():
    """Of bf16 layers against fp64, patched and not: one rounding instead of three."""
    model = llama(dtype=torch.bfloat16)
    before = logits(model).double()
    with patch(model):
        after = logits(model).double()
    exact = logits(copy.deepcopy(model).double())
    assert (after - exact).norm() < 1.1 * (before - exact).norm()


def test_training():
    def gradients(model):
        model.zero_grad()
        model(input_ids=IDS, labels=IDS, attention_mask=PADDED).loss.backward()
        return [weight.grad.clone() for weight in model.parameters()]

    model = llama().train()
    expected = gradients(model)
    with patch(model), astrai_core.explain() as report:
        got = gradients(model)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)
    (row,) = rows(report)
    assert (row.chosen, row.calls) == ("torch_native", 2)
    assert "fwd=" in row.passed_over["cuda"]


def test_gradient_checkpointing():
    model = llama().train()
    model.activation_checkpointing_enable()
    with patch(model):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_compiled_as_one_graph():
    model = llama()
    with patch(model), torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_close(compiled(input_ids=IDS, use_cache=False).logits, expected)


def test_a_static_cache_is_masked_where_it_is_empty():
    model = llama()
    expected = logits(model)
    with patch(model), torch.inference_mode():
        cache = StaticCache(config=model.config, max_cache_len=16)
        first = model(input_ids=IDS[:, :4], cache=cache).logits
        rest = model(input_ids=IDS[:, 4:], cache=cache).logits
    assert_close(torch.cat((first, rest), 1), expected)


# --- what is not served ---------------------------------------------------------------------------


def attend(q_len=3, kv_len=3, mask=None, dim=32, v_dim=None, grad=False, **options):
    """One call of the attention function, and of sdpa; the recorded rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = (4, q_len, dim), (2, kv_len, dim), (2, kv_len, v_dim or dim)
    q, k, v = (torch.randn(2, *shape, generator=generator) for shape in shapes)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    found = []
    with torch.set_grad_enabled(grad), astrai_core.explain() as report:
        for name in ("astrai", "sdpa"):
            torch.manual_seed(0)
            found.append(AttentionInterface()[name](module, q, k, v, mask, **options)[0])
    return *found, rows(report)


FLOAT_MASK = torch.zeros(2, 1, 3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.5}, "dropout = 0.5"),
        ({"scaling": 0.5}, "scaling = 0.5, not 1 / sqrt(head_dim)"),
        ({"sliding_window": 2}, "sliding_window = 2, and there are more keys"),
        ({"mask": FLOAT_MASK}, "attn_mask is float32, not bool"),
        ({"mask": FLOAT_MASK[:1] == 0}, "attn_mask is not [batch, 1, queries, keys]"),
        ({"v_dim": 16}, "queries, keys and values differ in head_dim or batch"),
        ({"position_bias": torch.randn(1, 4, 3, 3)}, "position_bias is given"),
    ],
)
def test_other_features_are_computed_by_sdpa(options, reason):
    got, expected, found = attend(**options)
    assert torch.equal(got, expected)
    assert [(row.chosen, set(row.passed_over.values())) for row in found] == [
        ("transformers", {reason})
    ]
    strict = astrai_core.attn_backend("cuda")
    with strict, pytest.raises(RuntimeError, match="cuda is demanded by attn_backend"):
        attend(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"scaling": 32**-0.5, "sliding_window": 3},
        {"q_len": 1, "kv_len": 5},
        {"is_causal": False},
        {"mask": (FLOAT_MASK == 0).contiguous()},
        {"grad": True},
    ],
)
def test_what_is_served_is_sdpa_too(options):
    got, expected, found = attend(**options)
    assert_close(got, expected)
    assert [row.chosen for row in found] == ["torch_native"]


def test_what_goes_to_sdpa_is_aligned_to_the_last_key():
    """Without a mask our queries are the last ones, those of sdpa the first."""
    keep = torch.ones(2, 5, dtype=torch.bool).tril(3).expand(2, 1, 2, 5)
    got, _, _ = attend(2, 5, scaling=0.5)
    _, expected, _ = attend(2, 5, keep, scaling=0.5)
    assert_close(got, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"cu_seq_lens_q": torch.tensor([0, 1, 3])},
    ],
)
def test_what_sdpa_would_get_wrong_is_an_error(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        attend(**options)


def test_a_sliding_window():
    config = MistralConfig(**SIZES, sliding_window=4)
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": PADDED}
    expected, text = logits(model), model.generate(IDS, **options)
    with patch(model) as patched, astrai_core.explain() as report:
        assert len(patched.attentions) == 2
        assert_close(logits(model), expected)
        assert torch.equal(model.generate(IDS, **options), text)
    assert "sliding_window = 4, and there are more keys" in str(report)


def test_a_transformers_with_other_masks(monkeypatch):
    monkeypatch.setattr(_attention, "sdpa_mask", lambda cache_position: cache_position)
    with pytest.raises(RuntimeError, match=r"newer transformers is needed: .* without q_offset"):
        register_attention()
