# SPDX-License-Identifier: Apache-2.0
"""What `build_model` and `decode_step` refuse: named, and before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_model import LLAMA3, Model, copy_of, same_bits

from astrai_core.decode import build_model, decode_step, teardown


class Arguments:
    """Arguments of `build_model`, to be spoilt."""

    def __init__(self) -> None:
        self.model = Model([13, 13])
        self.weights, self.cfg = self.model.weights, self.model.cfg
        self.layer = self.weights["layers"][1]
        self.kv: Any = self.model.paged()
        self.max_seq_len: Any = 40

    def contiguous(self) -> list[Any]:
        self.kv = self.model.contiguous()
        return self.kv  # type: ignore[no-any-return]

    def build(self) -> Any:
        return build_model(self.weights, self.kv, self.cfg, self.max_seq_len)


def replace(where: str, key: Any, value: Any) -> Callable[[Arguments], None]:
    return lambda a: getattr(a, where).__setitem__(key, value)


def drop(where: str, key: str) -> Callable[[Arguments], Any]:
    return lambda a: getattr(a, where).pop(key)


def put(**values: Any) -> Callable[[Arguments], None]:
    def change(a: Arguments) -> None:
        for name, value in values.items():
            setattr(a, name, value)

    return change


VALUE_ERRORS: list[tuple[Callable[[Arguments], Any], str]] = [
    (drop("cfg", "theta"), r"cfg: expected the keys theta, got \['layers'"),
    (replace("cfg", "n_kv", 3), r"cfg\['n_kv'\]: expected a divisor of n_q = 4, got 3"),
    (replace("cfg", "hd", 31), r"cfg\['hd'\]: expected an even number, got 31"),
    (replace("cfg", "layers", 0), r"cfg\['layers'\]: expected at least 1, got 0"),
    (replace("cfg", "eps", -1.0), "cfg: expected eps >= 0 and theta > 0, got -1.0 and 10000.0"),
    (replace("cfg", "eps", math.inf), r"cfg\['eps'\]: expected a finite number, got inf"),
    (replace("cfg", "theta", math.nan), r"cfg\['theta'\]: expected a finite number, got nan"),
    (replace("cfg", "theta", 10**400), r"cfg\['theta'\]: expected a finite number, got inf"),
    (replace("cfg", "wdtype", "fp8"), r"cfg\['wdtype'\]: expected one of bf16, .*, got 'fp8'"),
    (
        replace("cfg", "rope_scaling", {"rope_type": "yarn"}),
        "expected rope_type llama3, got 'yarn'",
    ),
    (
        replace("cfg", "rope_scaling", {"factor": 8.0}),
        r"cfg\['rope_scaling'\]: expected the keys low_freq_factor, high_freq_factor",
    ),
    (
        replace("cfg", "rope_scaling", {**LLAMA3, "high_freq_factor": 1.0}),
        "factor > 0, .* and high_freq_factor > low_freq_factor > 0, got",
    ),
    (
        replace("cfg", "rope_scaling", {**LLAMA3, "original_max_position_embeddings": 0}),
        "original_max_position_embeddings > 0 and",
    ),
    (
        replace("cfg", "rope_scaling", {**LLAMA3, "original_max_position_embeddings": math.nan}),
        r"\['original_max_position_embeddings'\]: expected a finite number, got nan",
    ),
    (
        replace("weights", "embed", torch.zeros(100, 64).to_sparse()),
        r"weights\['embed'\]: expected a strided tensor, got torch.sparse_coo",
    ),
    (
        replace("weights", "embed", torch.zeros(100, 64, device="meta")),
        r"weights\['embed'\]: expected a tensor with memory, got one on meta",
    ),
    (
        lambda a: a.kv.update(dict.fromkeys("kv", [torch.zeros(0, 2, 8, 32)] * 2)),
        r"kv_cache\['k'\]\[0\]: expected at least one page, got none",
    ),
    (
        lambda a: a.kv["page_table"].__setitem__((1, 4), a.kv["page_table"][1, 0]),
        r"kv_cache\['page_table'\]: expected different pages in a row, got \d+ twice in 1",
    ),
    (
        lambda a: a.contiguous().__setitem__(1, a.kv[1][:1]),
        r"kv_cache\[1\]: expected a pair \(k, v\), got 1$",
    ),
    (replace("cfg", "page_size", 16), r"kv_cache\['page_size'\]: expected that of cfg, 16, got 8"),
    (drop("weights", "embed"), "weights: expected the keys embed, got"),
    (replace("cfg", "tied", False), "weights: expected the keys lm_head, got"),
    (
        lambda a: a.weights["layers"].pop(),
        r"weights\['layers'\]: expected a list of 2 dicts, got 1",
    ),
    (drop("layer", "up"), r"weights\['layers'\]\[1\]: expected the keys up, got"),
    (
        replace("layer", "q", torch.zeros(64, 128)),
        r"weights\['layers'\]\[1\]\['q'\]: expected shape \[128, 64\], got \[64, 128\]",
    ),
    (
        replace("layer", "down", torch.zeros(64, 96, device="meta")),
        r"\['down'\]: expected a tensor on cpu, got meta",
    ),
    (drop("kv", "page_table"), "kv_cache: expected the keys page_table, got"),
    (lambda a: a.kv["v"].pop(), r"kv_cache\['v'\]: expected a list of 2 tensors, got 1$"),
    (
        lambda a: a.kv["v"].__setitem__(1, a.kv["v"][1][:, :1]),
        r"kv_cache\['v'\]\[1\]: expected shape \[20, 2, 8, 32\], got \[20, 1, 8, 32\]",
    ),
    (
        lambda a: a.kv["page_table"].__setitem__((1, 4), 20),
        r"kv_cache\['page_table'\]: expected pages 0 to 19, got \d+ to 20",
    ),
    (
        lambda a: a.kv["page_table"].__setitem__((0, 0), -1),
        r"kv_cache\['page_table'\]: expected pages 0 to 19, got -1 to",
    ),
    (
        replace("kv", "page_table", torch.zeros(0, 5, dtype=torch.int32)),
        "kv_cache: expected at least one sequence, got none",
    ),
    (
        put(max_seq_len=41),
        "max_seq_len: expected at most the 40 tokens that kv_cache holds, got 41",
    ),
    (put(max_seq_len=0), "max_seq_len: expected at least 1, got 0"),
    (lambda a: a.contiguous().pop(), r"kv_cache: expected 2 pairs \(k, v\), got 1$"),
    (
        lambda a: a.contiguous().__setitem__(1, (torch.zeros(2, 2, 39, 32),) * 2),
        r"kv_cache\[1\]\[0\]: expected shape \[2, 2, 40, 32\], got \[2, 2, 39, 32\]",
    ),
    (
        lambda a: put(max_seq_len=41)(a) or a.contiguous(),
        "max_seq_len: expected at most the 40 tokens",
    ),
]
TYPE_ERRORS: list[tuple[Callable[[Arguments], Any], str]] = [
    (put(cfg=[]), "cfg: expected a dict, got list"),
    (put(weights=None), "weights: expected a dict, got NoneType"),
    (put(kv=torch.zeros(2)), "kv_cache: expected a dict of page pools or a list"),
    (
        replace("kv", "k", torch.zeros(2, 20, 2, 8, 32)),
        r"kv_cache\['k'\]: expected a list of 2 tensors, got Tensor",
    ),
    (
        put(kv=[torch.zeros(2, 2, 2, 40, 32)] * 2),
        r"kv_cache\[0\]: expected a pair \(k, v\), got Tensor",
    ),
    (replace("cfg", "page_size", 8.0), r"cfg\['page_size'\]: expected an int, got 8.0"),
    (
        replace("cfg", "page_size", torch.tensor(8)),
        r"cfg\['page_size'\]: expected an int, got tensor\(8\)",
    ),
    (put(max_seq_len=40.0), "max_seq_len: expected an int, got 40.0"),
    (replace("cfg", "d", "64"), r"cfg\['d'\]: expected an int, got '64'"),
    (replace("cfg", "eps", None), r"cfg\['eps'\]: expected a number, got None"),
    (replace("cfg", "tied", 1), r"cfg\['tied'\]: expected a bool, got 1"),
    (
        replace("cfg", "rope_scaling", 8.0),
        r"cfg\['rope_scaling'\]: expected a dict or None, got 8.0",
    ),
    (replace("layer", "k", [1.0]), r"\[1\]\['k'\]: expected a tensor, got list"),
    (
        replace("layer", "k", torch.zeros(64, 64).half()),
        r"\['k'\]: expected torch.float32, got torch.float16",
    ),
    (
        replace("kv", "page_table", torch.zeros(2, 5, dtype=torch.int64)),
        r"kv_cache\['page_table'\]: expected torch.int32, got torch.int64",
    ),
]


@pytest.mark.parametrize(("spoil", "words"), VALUE_ERRORS)
def test_values_that_do_not_fit(spoil: Callable[[Arguments], Any], words: str) -> None:
    refused(spoil, ValueError, words)


@pytest.mark.parametrize(("spoil", "words"), TYPE_ERRORS)
def test_types_that_do_not_fit(spoil: Callable[[Arguments], Any], words: str) -> None:
    refused(spoil, TypeError, words)


def refused(spoil: Callable[[Arguments], Any], error: type[Exception], words: str) -> None:
    arguments = Arguments()
    spoil(arguments)
    with pytest.raises(error, match=words):
        arguments.build()


IDS = torch.tensor([1, 2])
STEPS: list[tuple[Any, Any, type[Exception], str]] = [
    ([1, 2], 13, TypeError, "token_ids: expected a tensor, got list"),
    (IDS[:1], 13, ValueError, r"token_ids: expected shape \[2\], got \[1\]"),
    (IDS[None], 13, ValueError, r"token_ids: expected shape \[2\], got \[1, 2\]"),
    (IDS.int(), 13, TypeError, "token_ids: expected torch.int64, got torch.int32"),
    (IDS.to("meta"), 13, ValueError, "token_ids: expected a tensor on cpu, got meta"),
    (IDS.to_sparse(), 13, ValueError, "token_ids: expected a strided tensor, got torch.sparse_coo"),
    (IDS - 2, 13, ValueError, "token_ids: expected 0 to 99, got -1 to 0"),
    (IDS + 98, 13, ValueError, "token_ids: expected 0 to 99, got 99 to 100"),
    (IDS, torch.tensor(-1), ValueError, "pos: expected 0 to 39, got -1"),
    (IDS, torch.tensor([13, -27]), ValueError, "pos: expected 0 to 39, got -27 to 13"),
    (IDS, torch.tensor([40, 13]), ValueError, "pos: expected 0 to 39, got 13 to 40"),
    (IDS, -1, ValueError, "pos: expected 0 to 39, got -1"),
    (IDS, 40, ValueError, "pos: expected 0 to 39, got 40"),
    (IDS, 13.0, TypeError, "pos: expected an int or a tensor, got float"),
    (IDS, True, TypeError, "pos: expected an int or a tensor, got bool"),
    (IDS, IDS[None], ValueError, r"pos: expected shape \[\] or \[2\], got \[1, 2\]"),
    (IDS, IDS.int(), TypeError, "pos: expected torch.int64, got torch.int32"),
    (IDS, IDS.to("meta"), ValueError, "pos: expected a tensor on cpu, got meta"),
]


@pytest.mark.parametrize(("ids", "pos", "error", "words"), STEPS)
def test_steps_that_do_not_fit(ids: Any, pos: Any, error: type[Exception], words: str) -> None:
    arguments = Arguments()
    handle = arguments.build()
    before = copy_of(arguments.kv)
    with pytest.raises(error, match=f"^{words}$"):
        decode_step(handle, ids, pos)
    assert same_bits(arguments.kv, before)


@pytest.mark.parametrize("function", [teardown, lambda h: decode_step(h, IDS, 0)])
def test_another_handle(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="handle: expected that of build_model, got dict"):
        function({})


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_pools_of_inference_mode_are_used_in_it_only(kind: str) -> None:
    model = Model([3])
    with torch.inference_mode():
        cache = model.cache(kind)
        handle = build_model(model.weights, cache, model.cfg, 40)
        decode_step(handle, torch.tensor([1]), 3)
    words = r"^kv_cache\[.*\]: expected a tensor that can be written to here, got an inference"
    with pytest.raises(ValueError, match=words):
        build_model(model.weights, cache, model.cfg, 40)
    with pytest.raises(RuntimeError, match=r"^handle: expected inference mode, as its"):
        decode_step(handle, torch.tensor([1]), 4)


def test_a_table_and_weights_of_inference_mode_are_used_anywhere() -> None:
    model = Model([3])
    cache = model.paged()
    with torch.inference_mode():
        cache["page_table"] = cache["page_table"].clone()
        weights = {**model.weights, "embed": model.weights["embed"].clone()}
    handle = build_model(weights, cache, model.cfg, 40)
    assert decode_step(handle, torch.tensor([1]), 3).isfinite().all()


def test_autocast_changes_nothing() -> None:
    model = Model([3])
    caches = [model.contiguous() for _ in range(2)]
    plain = build_model(model.weights, caches[0], model.cfg, 40)
    expected = decode_step(plain, torch.tensor([1]), 3)
    with torch.autocast("cpu", torch.bfloat16):
        handle = build_model(model.weights, caches[1], model.cfg, 40)
        logits = decode_step(handle, torch.tensor([1]), 3)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(logits, expected)
    assert same_bits(*caches)
