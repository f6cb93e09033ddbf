# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import astrai_core
from astrai_core.integrations.transformers import patch

IDS = torch.tensor([[5, 17, 3, 60, 2, 9]])
LINEARS_PER_LAYER = 7


def config(**changes):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(sizes | changes))


def llama(dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(**changes)).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(input_ids=ids).logits.clone()


@pytest.fixture
def calls(monkeypatch):
    """Every call of the two functions, as (name, weights)."""
    seen = []

    def record(name, original):
        def recording(x, *weights):
            seen.append((name, *weights))
            return original(x, *weights)

        monkeypatch.setattr(astrai_core, name, recording)

    record("linear", astrai_core.linear)
    record("swiglu", astrai_core.swiglu)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_bitwise_those_of_the_model(dtype, tied, bias):
    # Attention by eager is left alone: rotary embedding rounds elsewhere than Llama's.
    options = {"attn_implementation": "eager", "attention_bias": bias, "mlp_bias": bias}
    model = llama(dtype, tie_word_embeddings=tied, **options)
    prompts = [IDS, IDS[:, :1], torch.cat([IDS, IDS.flip(1)])]
    expected = [logits(model, ids) for ids in prompts]
    with patch(model):
        got = [logits(model, ids) for ids in prompts]
    after = logits(model)
    assert all(map(torch.equal, got, expected))
    assert torch.equal(after, expected[0])


def test_every_linear_and_mlp_goes_through_core(calls):
    model = llama()
    with patch(model) as patched:
        logits(model)
    assert len(patched.linears) == 2 * LINEARS_PER_LAYER + 1
    assert patched.mlps == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert not patched.skipped
    fused = [weights for name, *weights in calls if name == "swiglu"]
    for layer, (up, gate) in zip(model.model.layers, fused, strict=True):
        assert up is layer.mlp.up_proj.weight
        assert gate is layer.mlp.gate_proj.weight
    # Of the seven linears of a layer, two are in its swiglu.
    assert len(calls) - len(fused) == 2 * (LINEARS_PER_LAYER - 2) + 1
    assert calls[-1][1] is model.model.embed_tokens.weight


def test_biases_are_passed_on(calls):
    model = llama(attention_bias=True)
    with patch(model):
        logits(model)
    assert calls[0][2] is model.model.layers[0].self_attn.q_proj.bias


def test_restore_leaves_no_trace():
    model = llama()
    classes = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    weights = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    patched = patch(model)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == weights
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in patched.linears)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    patched.restore()
    patched.restore()
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == attributes


def test_a_second_patch_is_an_error_that_changes_nothing():
    model = llama()
    inner = patch(model.model.layers[1])
    with pytest.raises(RuntimeError, match=r"already patched \(at 'model.layers.1.*restore"):
        patch(model)
    assert type(model.lm_head) is nn.Linear
    inner.restore()
    patch(model).restore()


def test_saved_while_patched(tmp_path):
    model = llama()
    with patch(model):
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(loaded.lm_head) is nn.Linear
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(got, expected[name]) for name, got in loaded.state_dict().items())


def test_gradients_are_those_of_the_model():
    def gradients(model):
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    model = llama(torch.float32).train()
    expected = gradients(model)
    with patch(model):
        got = gradients(model)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj", "act_fn"])
@pytest.mark.parametrize("late", [True, False])
def test_hooks_inside_an_mlp_still_run(part, late, calls):
    model = llama()
    mlp = model.model.layers[0].mlp
    expected = logits(model)
    patched = patch(model) if late else None
    seen = []
    hook = getattr(mlp, part).register_forward_hook(lambda *_: seen.append(part))
    with patched or patch(model):
        assert torch.equal(logits(model), expected)
    assert seen == [part]
    hook.remove()
    fused = sum(name == "swiglu" for name, *_ in calls)
    assert fused == (2 if part == "down_proj" else 1)


def test_hooks_on_every_module_still_run():
    model = llama()
    seen = []
    with patch(model):
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(module)
        )
        try:
            logits(model)
        finally:
            hook.remove()
    assert model.model.layers[1].mlp.gate_proj in seen


class Adapter(nn.Module):
    """A linear with something added, as adapters have it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self):
        return self.base.weight

    bias = None

    def forward(self, x):
        return self.base(x) + 1


def test_an_adapter_put_in_later_is_not_bypassed(calls):
    model = llama()
    mlp = model.model.layers[0].mlp
    with patch(model):
        mlp.up_proj = Adapter(mlp.up_proj)
        got = logits(model)
    assert sum(name == "swiglu" for name, *_ in calls) == 1
    assert torch.equal(got, logits(model))


def test_an_activation_put_in_later_is_not_bypassed():
    model = llama()
    mlp = model.model.layers[0].mlp
    with patch(model):
        mlp.act_fn = nn.Tanh()
        got = logits(model)
    assert torch.equal(got, logits(model))


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class NotALinear(nn.Module):
    in_features = out_features = 32


class OddTensor(torch.Tensor):
    pass


class ClampedMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-1, 1))


class ShortMLP(LlamaMLP):
    def forward(self, hidden):
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


def wrapped(module):
    module.forward = functools.partial(module.forward)
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ScaledLinear(32, 32), "ScaledLinear has a forward of its own"),
        (NotALinear, "NotALinear is not an nn.Linear"),
        (lambda: wrapped(nn.Linear(4, 4)), "its forward was replaced on the instance"),
        (lambda: nn.LazyLinear(4), "its weight is a UninitializedParameter"),
        (lambda: ClampedMLP(config()), "the forward of ClampedMLP is not that of a Llama MLP"),
        (lambda: LlamaMLP(config(hidden_act="gelu")), "its activation is GELUActivation, not SiLU"),
        (lambda: LlamaMLP(config(mlp_bias=True)), "gate_proj has a bias"),
        (lambda: wrapped(LlamaMLP(config())), "its forward was replaced on the instance"),
    ],
)
def test_what_is_not_understood_is_left_alone(make, reason):
    module = make()
    kind = type(module)
    holder = nn.ModuleDict({"it": module, "plain": nn.Linear(4, 4)})
    patched = patch(holder)
    assert patched.skipped == {"it": reason}
    assert type(module) is kind
    assert "plain" in patched.linears


def test_a_weight_of_another_tensor_class_is_left_alone():
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(OddTensor))
    assert patch(module).skipped == {"": "its weight is a OddTensor"}


def test_an_mlp_with_an_odd_projection_computes_from_its_modules():
    mlp = LlamaMLP(config())
    mlp.gate_proj = ScaledLinear(32, 48, bias=False)
    expected = mlp(torch.ones(1, 32))
    patched = patch(mlp)
    assert patched.skipped == {
        "": "gate_proj: ScaledLinear has a forward of its own",
        "gate_proj": "ScaledLinear has a forward of its own",
    }
    assert torch.equal(mlp(torch.ones(1, 32)), expected)


@pytest.mark.parametrize("act", [nn.SiLU(), functional.silu])
def test_other_spellings_of_a_llama_mlp(act, calls):
    mlp = ShortMLP(config())
    del mlp.act_fn
    mlp.act_fn = act
    expected = mlp(torch.ones(1, 32))
    assert patch(mlp).mlps == ("",)
    assert torch.equal(mlp(torch.ones(1, 32)), expected)
    assert calls[0][0] == "swiglu"


def test_linear_takes_its_input_by_name():
    linear = nn.Linear(4, 4)
    expected = linear(input=torch.ones(4))
    patch(linear)
    assert torch.equal(linear(input=torch.ones(4)), expected)
    assert repr(linear) == "AstraiLinear(in_features=4, out_features=4, bias=True)"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_patched_and_independent(copied, calls):
    model = llama()
    expected = logits(model)
    patched = patch(model)
    other = copied(model)
    patched.restore()
    assert torch.equal(logits(other), expected)
    assert calls[0][1] is other.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(RuntimeError, match="already patched"):
        patch(other)


def test_a_deleted_model_is_gone_at_once():
    model = llama()
    patch(model)
    gone = weakref.ref(model.lm_head)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_restore_names_what_another_library_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    patched = patch(model)
    wrapped(model[0])
    with pytest.raises(RuntimeError, match=r"changed after patch\(\): 0$"):
        patched.restore()
    assert type(model[1]) is nn.Linear
    del model[0].forward
    patched.restore()
    assert type(model[0]) is nn.Linear


def test_compiled():
    model = llama(torch.float32)
    expected = logits(model)
    with patch(model):
        compiled = torch.compile(model.model.layers[0].mlp, backend="eager", fullgraph=True)
        x = torch.randn(1, 3, 32)
        assert torch.equal(compiled(x), model.model.layers[0].mlp(x))
    assert torch.equal(logits(model), expected)
