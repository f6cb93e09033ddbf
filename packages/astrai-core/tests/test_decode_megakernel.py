# SPDX-License-Identifier: Apache-2.0
"""Decoding by a package of its own: what it is given, what it may return, and how it may break."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from decode_model import Model, build, reasons
from torch import Tensor

import astrai_core
from astrai_core.decode import build_model, decode_step, teardown
from astrai_core.tables import Row
from conftest import Site

ROW = Row("decode", "megakernel", (1, 8), (1, None), (1, None), 1, "measured")
COMPOSED = Row(**{**vars(ROW), "implementation": "composed"})
SOURCE = """
import types
import torch
log = []
given = []
def unsupported(cfg, batch, max_seq_len, kind):
    log.append(("unsupported", cfg["d"], batch, max_seq_len, kind))
    return None if kind == "paged" else "it takes paged caches"
def build_model(weights, kv_cache, cfg, max_seq_len):
    log.append("build_model")
    given.append((weights, kv_cache, cfg, max_seq_len, torch.is_grad_enabled()))
    return weights["embed"], max_seq_len
def decode_step(handle, token_ids, pos):
    log.append(("decode_step", torch.is_grad_enabled()))
    return handle[0][:, 0].expand(len(token_ids), -1) + pos
def teardown(handle):
    log.append("teardown")
decode = types.SimpleNamespace(**{f.__name__: f for f in
    (unsupported, build_model, decode_step, teardown)})
"""


@pytest.fixture
def megakernel(site: Site, seen_as_gpu: None) -> ModuleType:
    del seen_as_gpu
    package = site.add("megakernel", native={"_native.py": SOURCE}, OPS={"decode": ("bfloat16",)})
    return site.native_of(package)


def test_it_decodes_what_it_supports(
    megakernel: ModuleType, preferred: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    preferred += [ROW, COMPOSED]
    model = Model([3], dtype=torch.bfloat16)
    handle = build(model)
    assert handle.implementation == "megakernel"
    logits = decode_step(handle, model.tokens(), 3)
    assert torch.equal(logits[0], model.weights["embed"][:, 0] + 3)
    teardown(handle)
    question = ("unsupported", 64, 1, 40, "paged")
    assert megakernel.log == [question, "build_model", ("decode_step", False), "teardown"]
    monkeypatch.setenv("ASTRAI_DECODE", "megakernel")
    chosen, why = reasons(model, model.contiguous())
    assert (chosen, why["megakernel"]) == ("torch", "it takes paged caches")


@pytest.mark.usefixtures("kernels")
def test_the_next_row_decodes_what_it_does_not(
    megakernel: ModuleType, preferred: list[Row]
) -> None:
    del megakernel
    preferred += [ROW, COMPOSED]
    model = Model([3], dtype=torch.bfloat16)
    assert reasons(model, model.contiguous()) == (
        "composed",
        {"torch": "the measured table prefers composed", "megakernel": "it takes paged caches"},
    )


def test_it_is_given_checked_tensors_without_a_graph(megakernel: ModuleType) -> None:
    model = Model([3], dtype=torch.bfloat16, changes={"tied": False})
    model.weights["embed"].requires_grad_()
    model.weights["layers"][1]["up"].requires_grad_()
    cache = model.paged()
    table = cache["page_table"]
    with astrai_core.use(decode="megakernel"):
        handle = build_model(model.weights, cache, model.cfg, 12)
    ((weights, given, cfg, max_seq_len, grad),) = megakernel.given
    assert {*weights} == {*model.weights} and (cfg, max_seq_len, grad) == (model.cfg, 12, False)
    layer = weights["layers"][1]
    assert {*layer} == {*model.weights["layers"][1]}
    assert not weights["embed"].requires_grad and not layer["up"].requires_grad
    assert torch.equal(given["page_table"], table[:, :2])
    assert given["page_table"].data_ptr() != table.data_ptr()
    assert given["v"][1].data_ptr() == cache["v"][1].data_ptr() and given["page_size"] == 8
    assert not decode_step(handle, model.tokens(), torch.tensor(3)).requires_grad


def test_it_is_given_a_contiguous_cache(
    megakernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megakernel.decode, "unsupported", lambda *_: None)
    model = Model([3], dtype=torch.bfloat16)
    cache = model.contiguous()
    with astrai_core.use(decode="megakernel"):
        build(model, cache)
    pairs = megakernel.given[0][1]
    assert [[x.data_ptr() for x in pair] for pair in pairs] == [
        [x.data_ptr() for x in pair] for pair in cache
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_the_callers_to_keep(
    megakernel: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = torch.ones(1, 100, dtype=dtype)
    monkeypatch.setattr(megakernel.decode, "decode_step", lambda *_: buffer)
    model = Model([3], dtype=torch.bfloat16)
    with astrai_core.use(decode="megakernel"):
        logits = decode_step(build(model), model.tokens(), 3)
    buffer.zero_()
    assert logits.dtype == torch.bfloat16 and bool((logits == 1).all())


@pytest.mark.parametrize(
    ("logits", "found"),
    [
        (torch.zeros(100, dtype=torch.bfloat16), r"\[100\] in torch.bfloat16 on cpu"),
        (torch.zeros(1, 100, dtype=torch.float16), r"\[1, 100\] in torch.float16 on cpu"),
        (torch.zeros(1, 100, device="meta"), r"\[1, 100\] in torch.float32 on meta"),
        (None, "NoneType"),
    ],
)
def test_other_logits_are_an_error(
    megakernel: ModuleType, logits: Tensor | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megakernel.decode, "decode_step", lambda *_: logits)
    model = Model([3], dtype=torch.bfloat16)
    with astrai_core.use(decode="megakernel"):
        handle = build(model)
    expected = r"megakernel: expected logits \[1, 100\] in torch.bfloat16 or torch.float32 on cpu"
    with pytest.raises(RuntimeError, match=f"^{expected}, got {found}$"):
        decode_step(handle, model.tokens(), 3)


def test_its_teardown_is_optional(megakernel: ModuleType) -> None:
    del megakernel.decode.teardown
    with astrai_core.use(decode="megakernel"):
        teardown(build(Model([3], dtype=torch.bfloat16)))


def fails(*_: object) -> str:
    raise KeyError("rope_scaling")


FAILURE = "unsupported() of the package failed: KeyError: 'rope_scaling'"


@pytest.mark.parametrize("rows", [[], [ROW], [ROW, COMPOSED]])
@pytest.mark.usefixtures("kernels")
def test_a_broken_package_leaves_decoding_to_the_others(
    megakernel: ModuleType,
    preferred: list[Row],
    rows: list[Row],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preferred += rows
    monkeypatch.setattr(megakernel.decode, "unsupported", fails)
    model = Model([3], dtype=torch.bfloat16)
    chosen, why = reasons(model)
    assert chosen == ("composed" if COMPOSED in rows else "torch")
    # Without a row it is not even asked.
    forces = "no measurement on sm_90 prefers it (ASTRAI_DECODE=megakernel forces it)"
    assert why["megakernel"] == (FAILURE if rows else forces)
    monkeypatch.setenv("ASTRAI_DECODE", "megakernel")
    chosen, why = reasons(model)
    assert (chosen, why["megakernel"]) == ("torch", FAILURE)
    with (
        astrai_core.use(decode="megakernel"),
        pytest.raises(RuntimeError, match=r"^decode: megakernel is demanded by use\(\): unsupp"),
    ):
        build(model)
