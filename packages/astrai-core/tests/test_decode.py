# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode by torch: the document's computation, caches and positions of every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_model import (
    LLAMA3,
    Exact,
    Model,
    copy_of,
    relative,
    same_bits,
    take_back,
    written,
)
from torch import Tensor

import astrai_core
from astrai_core.decode import build_model, decode_step, teardown

FORMS: dict[str, Callable[[list[int]], int | Tensor]] = {
    "int": lambda pos: pos[0],
    "scalar": lambda pos: torch.tensor(pos[0]),
    "each": torch.tensor,
}
KINDS = ("paged", "contiguous")


def errors(model: Model, cache: Any, form: str = "int", steps: int = 3) -> list[float]:
    """Relative errors of some steps; the cache is checked too."""
    exact = Exact(model)
    handle = build_model(model.weights, cache, model.cfg, model.capacity)
    found = []
    for step in range(steps):
        pos, ids = [past + step for past in model.past], model.tokens()
        got = decode_step(handle, ids, FORMS[form](pos))
        assert got.shape == (model.batch, model.cfg["vocab"]) and got.dtype == model.dtype
        found.append(relative(got, exact.step(ids, pos)))
        for b, position in enumerate(pos):
            for layer in range(model.cfg["layers"]):
                for side, rows in enumerate((exact.k, exact.v)):
                    stored = written(cache, layer, side, b, position)
                    assert relative(stored, rows[layer][b][position]) < 0.05
    teardown(handle)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_documents_computation(kind: str, form: str) -> None:
    model = Model([13, 13])
    assert max(errors(model, model.cache(kind), form)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_has_its_own_position(kind: str) -> None:
    model = Model([0, 21, 7])
    assert max(errors(model, model.cache(kind), "each")) < 1e-5


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_batches(batch: int) -> None:
    model = Model([9] * batch)
    assert max(errors(model, model.paged())) < 1e-5


@pytest.mark.parametrize("page_size", [1, 3, 16, 40, 512])
def test_page_sizes(page_size: int) -> None:
    model = Model([15, 15])
    assert max(errors(model, model.paged(page_size))) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"tied": False},
        {"rope_scaling": LLAMA3, "theta": 500.0},
        {"n_q": 6, "n_kv": 3, "hd": 20, "d": 50, "ffn": 33},
        {"n_q": 2, "n_kv": 2, "layers": 1, "page_size": 8},
    ],
)
def test_configurations(changes: dict[str, Any]) -> None:
    model = Model([30, 30], changes=changes)
    assert max(errors(model, model.paged())) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision(dtype: torch.dtype, bound: float, kind: str) -> None:
    model = Model([13, 13], dtype=dtype)
    assert max(errors(model, model.cache(kind))) < bound


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_but_the_new_token_is_written(kind: str, form: str, dtype: torch.dtype) -> None:
    model = Model([13, 13], dtype=dtype)
    cache = model.cache(kind)
    before = copy_of(cache)
    handle = build_model(model.weights, cache, model.cfg, model.capacity)
    assert same_bits(cache, before)
    decode_step(handle, model.tokens(), FORMS[form]([13, 13]))
    assert not same_bits(cache, before)
    take_back(cache, before, [13, 13])
    assert same_bits(cache, before)


def test_it_reaches_the_last_token_of_its_capacity() -> None:
    model = Model([39], capacity=40)
    handle = build_model(model.weights, model.paged(), model.cfg, 40)
    assert decode_step(handle, model.tokens(), 39).isfinite().all()


def test_pages_past_the_last_token_need_not_exist() -> None:
    model = Model([9])
    cache = model.paged(8)
    cache["page_table"][:, 2:] = 2**31 - 1
    handle = build_model(model.weights, cache, model.cfg, 16)
    exact, ids = Exact(model), model.tokens()
    assert relative(decode_step(handle, ids, 9), exact.step(ids, [9])) < 1e-5


def test_logits_are_the_callers_to_keep() -> None:
    model = Model([3])
    handle = build_model(model.weights, model.paged(), model.cfg, model.capacity)
    first = decode_step(handle, model.tokens(), 3)
    kept = first.clone()
    decode_step(handle, model.tokens(), 4)
    assert torch.equal(first, kept)


def test_parameters_make_no_graph() -> None:
    model = Model([3])
    weights = dict(model.weights, embed=torch.nn.Parameter(model.weights["embed"]))
    handle = build_model(weights, model.paged(), model.cfg, model.capacity)
    assert not decode_step(handle, model.tokens(), 3).requires_grad


def test_a_handle_of_inference_mode_works_outside_of_it() -> None:
    model = Model([3])
    cache = model.paged()
    with torch.inference_mode():
        handle = build_model(model.weights, cache, model.cfg, model.capacity)
    assert decode_step(handle, model.tokens(), torch.tensor([3])).isfinite().all()


def test_teardown() -> None:
    model = Model([3])
    handle = build_model(model.weights, model.paged(), model.cfg, model.capacity)
    teardown(handle)
    teardown(handle)
    with pytest.raises(RuntimeError, match="handle: expected one in use, got one after teardown"):
        decode_step(handle, model.tokens(), 3)


def test_explain_counts_the_steps() -> None:
    model = Model([3, 3])
    with astrai_core.explain() as report:
        handle = build_model(model.weights, model.paged(), model.cfg, model.capacity)
        for pos in (3, 4, 5):
            decode_step(handle, model.tokens(), pos)
    built, steps = report.rows
    assert (built.op, built.calls, built.chosen) == ("decode", 1, "torch")
    assert built.shapes == "build_model: 2 layers of 64, 2 sequences up to 40 tokens"
    assert (steps.op, steps.calls, steps.shapes) == ("decode", 3, "decode_step: token_ids [2]")
    reason = "the weights are not on a CUDA device"
    assert steps.passed_over == {"composed": reason, "megakernel": reason}


def test_the_package_has_it_as_an_attribute() -> None:
    assert astrai_core.decode.build_model is build_model
