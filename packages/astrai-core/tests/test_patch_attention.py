# SPDX-License-Identifier: Apache-2.0
"""Attention and rotary embedding of patched models: what is called, and what restore() leaves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny_llama import IDS, PADDED, SIZES, assert_close, llama, logits, rows
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereAttention, CohereConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

import astrai_core
from astrai_core.integrations.transformers import _attention, _patch, patch
from conftest import install_attention

# --- what is called -------------------------------------------------------------------------------


def test_kernels_see_no_copy_of_the_cache(site, gpus, monkeypatch):
    """Both kernels of attention, and that of rotary, with K and V where transformers has them."""
    native = install_attention(site)
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    seen = []
    decode = native.attn_decode
    monkeypatch.setattr(native, "attn_decode", lambda *a: [seen.append(a), decode(*a)][1])
    model = llama(dtype=torch.bfloat16)
    expected = llama(dtype=torch.bfloat16).double()
    reference = logits(expected)
    with patch(model), torch.inference_mode(), astrai_core.explain() as report:
        out = model(input_ids=IDS[:, :6], use_cache=True)
        out = model(input_ids=IDS[:, 6:], use_cache=True, cache=out.cache)
    assert set(native.calls) == {"attn_prefill", "attn_decode", "rotary_emb"}
    assert {row.chosen for row in rows(report)} == {"cuda"}
    assert {row.chosen for row in rows(report, "rotary_emb")} == {"attention"}
    assert "k, v [2, any, 2, 32] decode" in rows(report)[1].shapes
    for layer, (q, k, v, mask, _) in enumerate(seen):
        assert q.is_contiguous()
        assert mask is None
        assert k.data_ptr() == out.cache.layers[layer].keys.data_ptr()
        assert v.data_ptr() == out.cache.layers[layer].values.data_ptr()
    error = (out.logits[:, -1].double() - reference[:, -1]).norm() / reference[:, -1].norm()
    assert error < 0.05


def test_a_padding_mask_reaches_the_kernels_as_bool(site, gpus, monkeypatch):
    native = install_attention(site)
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    masks = []
    prefill = native.attn_prefill
    monkeypatch.setattr(native, "attn_prefill", lambda *a: [masks.append(a[3]), prefill(*a)][1])
    model = llama(dtype=torch.bfloat16)
    with patch(model):
        logits(model, attention_mask=PADDED)
        logits(model, attention_mask=torch.ones_like(PADDED))
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    assert torch.equal(masks[0], causal & PADDED.bool()[:, None])
    assert masks[2:] == [None, None]


@pytest.mark.parametrize("mask", [None, torch.ones_like(IDS), PADDED])
def test_a_forward_on_fake_tensors(mask):
    model = llama("astrai")
    with patch(model), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        assert model(input_ids=IDS, attention_mask=mask).logits.shape == (2, 7, 64)


@pytest.mark.usefixtures("seen_as_gpu")
def test_a_capture_reads_no_padding_mask(monkeypatch):
    def read(_):
        raise AssertionError("the capture waits for a value")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "__bool__", read)
    assert not _attention._keeps_all(PADDED, 0, 7)
    assert _attention._keeps_all(None, 0, 7)


def test_angles_are_converted_once_a_pass():
    model = llama(dtype=torch.bfloat16)
    seen = []
    original = astrai_core.apply_rotary_emb

    def spy(x, angles, **options):
        seen.append(angles)
        return original(x, angles, **options)

    with patch(model), torch.no_grad(), pytest.MonkeyPatch.context() as m:
        m.setattr(astrai_core, "apply_rotary_emb", spy)
        model(input_ids=IDS)
        model(input_ids=IDS.flip(1)[:, :3])
    first, second = seen[:4], seen[4:]
    for passes in (first, second):
        assert len(passes) == 4
        assert all(cos is passes[0][0] and sin is passes[0][1] for cos, sin in passes)
    assert first[0][0] is not second[0][0]
    assert first[0][0].shape == (1, 7, 16)
    assert first[0][0].dtype is torch.float32


@pytest.mark.parametrize(
    ("made", "used"),
    [
        (torch.no_grad, torch.no_grad),
        (torch.no_grad, torch.inference_mode),
        (torch.inference_mode, torch.inference_mode),
    ],
)
def test_angles_that_were_written_to_are_converted_anew(made, used):
    model = llama()
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 3, 128)
    with made():
        cos, sin = torch.ones(1, 3, 32), torch.zeros(1, 3, 32)
    with used(), patch(model):
        attention(x, (cos, sin))
        cos.zero_()
        sin.fill_(1)
        got, _ = attention(x, (cos, sin))
        expected, _ = attention(x, (cos.clone(), sin.clone()))
    assert torch.equal(got, expected)


def test_a_strict_backend_is_strict():
    model = llama()
    with patch(model), astrai_core.attn_backend("cuda"), pytest.raises(RuntimeError, match="cuda"):
        logits(model)


# --- patch and restore ----------------------------------------------------------------------------


def test_restore_leaves_no_trace():
    model = llama()
    attention = model.model.layers[0].self_attn
    function = modeling_llama.apply_rotary_pos_emb
    patched = patch(model)
    assert patched.attentions == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert not patched.skipped
    assert isinstance(attention, LlamaAttention)
    assert type(attention) is not LlamaAttention
    assert model.config._attn_implementation == "astrai"
    assert modeling_llama.apply_rotary_pos_emb is function
    patched.restore()
    assert type(attention) is LlamaAttention
    assert model.config._attn_implementation == "sdpa"


def test_restore_keeps_an_implementation_that_was_set_since():
    model = llama()
    patched = patch(model)
    model.set_attn_implementation("eager")
    patched.restore()
    assert model.config._attn_implementation == "eager"


def test_restore_keeps_an_implementation_that_was_set_before():
    model = llama("astrai")
    patch(model).restore()
    assert model.config._attn_implementation == "astrai"


def test_another_implementation_is_left_alone():
    model = llama("eager")
    expected = logits(model)
    with patch(model) as patched:
        assert not patched.attentions
        reason = "its attn_implementation is eager, not sdpa"
        assert patched.skipped["model.layers.0.self_attn"] == reason
        assert torch.equal(logits(model), expected)
    assert model.config._attn_implementation == "eager"


def test_other_models_of_the_process_are_left_alone():
    model, other = llama(), llama()
    with patch(model), astrai_core.explain() as report:
        logits(other)
    assert not report.rows


class Inline(LlamaAttention):
    def forward(self, hidden_states, **_):
        return self.o_proj(self.q_proj(hidden_states)), None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Inline(LlamaConfig(**SIZES), 0), "Inline does not use apply_rotary_pos_emb"),
        (
            lambda: CohereAttention(CohereConfig(**SIZES), 0),
            "the apply_rotary_pos_emb of CohereAttention is not that of Llama",
        ),
    ],
)
def test_what_is_not_understood_is_left_alone(make, reason):
    module = make()
    module.config._attn_implementation = "sdpa"
    kind = type(module)
    patched = patch(nn.ModuleDict({"it": module}))
    assert reason in patched.skipped["it"]
    assert type(module) is kind
    assert module.config._attn_implementation == "sdpa"


def test_a_transformers_without_the_interface(monkeypatch):
    def refuse():
        raise RuntimeError("a newer transformers is needed")

    monkeypatch.setattr(_patch, "register_attention", refuse)
    model = llama()
    expected = logits(model)
    with patch(model) as patched:
        assert "newer" in patched.skipped["model.layers.0.self_attn"]
        assert_close(logits(model), expected)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_patched_and_independent(copied):
    model = llama()
    expected = logits(model)
    patched = patch(model)
    other = copied(model)
    patched.restore()
    with astrai_core.explain() as report:
        assert_close(logits(other), expected)
    assert rows(report)
    assert rows(report, "rotary_emb")
    assert model.config._attn_implementation == "sdpa"


def test_a_pickled_model_registers_attention_elsewhere(run_python, tmp_path):
    model = llama()
    with patch(model):
        (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    script = f"""
import pickle, torch
from pathlib import Path
model = pickle.loads(Path({str(tmp_path / "model.pickle")!r}).read_bytes())
print(model(input_ids=torch.tensor([[5, 7]])).logits.shape[1])
"""
    assert run_python(script).strip() == "2"


def test_functions_of_the_same_shape_are_not_llamas(monkeypatch):
    """Other constants or defaults are other mathematics, though the instructions are the same."""

    def quarters(x):
        """Not halves."""
        x1 = x[..., : x.shape[-1] // 4]
        x2 = x[..., x.shape[-1] // 4 :]
        return torch.cat((-x2, x1), dim=-1)

    quarters.__code__ = quarters.__code__.replace(co_name="rotate_half")
    model = llama()
    assert "model.layers.0.self_attn" not in patch(model).skipped
    monkeypatch.setattr(modeling_llama, "rotate_half", quarters)
    changed = patch(llama())
    assert "model.layers.0.self_attn" in changed.skipped
    monkeypatch.undo()
    original = modeling_llama.apply_rotary_pos_emb
    other = type(original)(
        original.__code__, original.__globals__, "apply_rotary_pos_emb", (2,), original.__closure__
    )
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    assert "model.layers.0.self_attn" in patch(llama()).skipped
