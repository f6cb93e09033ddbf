# SPDX-License-Identifier: Apache-2.0
"""Composed decode with stand-in kernels, and the selection among the implementations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from decode_model import LLAMA3, Exact, Model, build, pools, reasons, relative

import astrai_core
from astrai_core.decode import decode_step
from astrai_core.tables import Row
from conftest import Site

BF16 = torch.bfloat16
STANDIN = Path(__file__).with_name("decode_standin.py").read_text("utf-8")
OPS = {
    "gemv": ("bf16_gemv", "bf16_swiglu", "add_rms_norm"),
    "attention": ("rotary_emb", "attn_paged_decode"),
}
ROW = Row("decode", "composed", (1, 8), (1, None), (1, None), 1, "measured")


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("paged", {}),
        ("contiguous", {}),
        ("paged", {"tied": False}),
        ("paged", {"rope_scaling": LLAMA3}),
        ("contiguous", {"n_q": 6, "n_kv": 3, "ffn": 33}),
    ],
)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.usefixtures("kernels")
def test_it_is_as_close_to_exact_as_torch(kind: str, changes: dict[str, Any], each: bool) -> None:
    model = Model([9, 3, 12] if each else [9, 9], dtype=BF16, changes=changes)
    exact = Exact(model)
    handles, caches = {}, {}
    for name in ("torch", "composed"):
        caches[name] = model.cache(kind)
        with astrai_core.use(decode=name):
            handles[name] = build(model, caches[name])
        assert handles[name].implementation == name
    for step in range(3):
        ids, pos = model.tokens(), [past + step for past in model.past]
        form = torch.tensor(pos) if each else pos[0]
        expected = exact.step(ids, pos)
        found = {n: relative(decode_step(h, ids, form), expected) for n, h in handles.items()}
        assert found["composed"] < 2 * found["torch"] + 2**-9


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("capacity", [40, 37])
def test_the_caches_end_up_the_same(
    kernels: dict[str, ModuleType], kind: str, capacity: int
) -> None:
    model = Model([0, 5], dtype=BF16, capacity=capacity)
    model.random.manual_seed(1)
    by_torch = model.cache(kind)
    model.random.manual_seed(1)
    by_kernels = model.cache(kind)
    before = [pool.clone() for pool in pools(by_kernels)]
    with astrai_core.use(decode="torch"):
        first = build(model, by_torch)
    with astrai_core.use(decode="composed"):
        second = build(model, by_kernels)
    for pool, old in zip(pools(by_kernels), before, strict=True):
        assert torch.equal(pool.view(torch.int16), old.view(torch.int16))
    assert kernels["attention"].calls == []  # no GPU, nothing to warm up or capture
    pos, ids = torch.tensor([0, 5]), model.tokens()
    decode_step(first, ids, pos)
    decode_step(second, ids, pos)
    for a, b in zip(pools(by_torch), pools(by_kernels), strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert relative(b.nan_to_num(), a.nan_to_num().double()) < 0.02


def test_a_step_is_one_chain_of_kernels(kernels: dict[str, ModuleType]) -> None:
    model = Model([9, 9], dtype=BF16)
    with astrai_core.use(decode="composed"):
        decode_step(build(model), model.tokens(), 9)
    assert kernels["attention"].calls == ["rotary_emb", "attn_paged_decode"] * 2
    layer = ["add_rms_norm", "bf16_gemv", "bf16_gemv", "add_rms_norm", "bf16_swiglu", "bf16_gemv"]
    assert kernels["gemv"].calls == [*layer * 2, "add_rms_norm", "bf16_gemv"]


# --- selection ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
def test_without_a_measurement_torch_decodes(preferred: list[Row]) -> None:
    del preferred
    chosen, why = reasons(Model([3], dtype=BF16))
    assert chosen == "torch"
    forces = "no measurement on sm_90 prefers it (ASTRAI_DECODE=composed forces it)"
    assert why["composed"] == forces
    assert why["megakernel"].startswith("astrai-megakernel is not installed; pip install")


@pytest.mark.usefixtures("kernels")
def test_the_table_selects_by_batch_capacity_and_width(preferred: list[Row]) -> None:
    preferred.append(ROW)
    assert reasons(Model([3], dtype=BF16)) == (
        "composed",
        dict.fromkeys(("torch", "megakernel"), "the measured table prefers composed"),
    )
    for changes in ({"m": (2, 8)}, {"n": (41, None)}, {"k": (1, 63)}):
        preferred[:] = [Row(**{**vars(ROW), **changes})]
        assert reasons(Model([3], dtype=BF16))[0] == "torch"


@pytest.mark.usefixtures("kernels")
def test_environment_over_table(monkeypatch: pytest.MonkeyPatch, preferred: list[Row]) -> None:
    model = Model([3], dtype=BF16)
    preferred.append(ROW)
    monkeypatch.setenv("ASTRAI_DECODE", "torch")
    assert reasons(model) == (
        "torch",
        dict.fromkeys(("composed", "megakernel"), "ASTRAI_DECODE=torch"),
    )
    preferred.clear()
    monkeypatch.setenv("ASTRAI_DECODE", "composed")
    assert reasons(model)[0] == "composed"
    # What it cannot serve is torch's.
    chosen, why = reasons(Model([3]))
    assert (chosen, why["composed"]) == ("torch", "float32 weights: the kernels take bfloat16")


@pytest.mark.parametrize("value", ["", "0", "1", "kernel"])
def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ASTRAI_DECODE", value)
    expected = f"ASTRAI_DECODE: expected torch, composed, megakernel or auto, got '{value}'"
    with pytest.raises(ValueError, match=expected):
        build(Model([3]))


@pytest.mark.usefixtures("kernels")
def test_context_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_DECODE", "composed")
    with astrai_core.use(decode="torch"):
        assert reasons(Model([3], dtype=BF16)) == (
            "torch",
            dict.fromkeys(("composed", "megakernel"), "use() demands torch"),
        )
    with (
        astrai_core.use(decode="composed"),
        pytest.raises(RuntimeError, match=r"^decode: composed is demanded by use\(\): float32"),
    ):
        build(Model([3]))


def test_a_family_that_is_not_there_is_named(site: Site, seen_as_gpu: None) -> None:
    del seen_as_gpu
    model = Model([3], dtype=BF16)
    demand = astrai_core.use(decode="composed")
    with demand, pytest.raises(RuntimeError, match="astrai-gemv is not installed"):
        build(model)
    site.add(native={"_native.py": STANDIN}, OPS=dict.fromkeys(OPS["gemv"], ("bfloat16",)))
    with astrai_core.use(decode="composed"), pytest.raises(RuntimeError, match="astrai-attention"):
        build(model)
    site.add("attention", native={"_native.py": STANDIN}, OPS={"rotary_emb": ("bfloat16",)})
    old = "astrai-attention 0.1.0 has no attn_paged_decode for bfloat16; pip install -U"
    with astrai_core.use(decode="composed"), pytest.raises(RuntimeError, match=old):
        build(model)


def other_strides(cache: dict[str, Any]) -> None:
    pool = cache["v"][0]
    cache["v"][0] = pool.transpose(1, 2).contiguous().transpose(1, 2)


def off_boundary(cache: dict[str, Any]) -> None:
    pool = cache["k"][0]
    room = torch.empty(pool.numel() + 1, dtype=BF16)
    cache["k"][0] = room[1:].view(pool.shape).copy_(pool)


def one_tensor(cache: dict[str, Any]) -> None:
    both = torch.stack((cache["k"][1], cache["v"][1]), 1)
    cache["k"][1], cache["v"][1] = both.unbind(1)


@pytest.mark.parametrize(
    ("model", "spoil", "words"),
    [
        (Model([3] * 9, dtype=BF16), None, "9 sequences: the kernels take 1 to 8"),
        (Model([3], dtype=BF16, changes={"hd": 16}), None, "hd = 16: the kernels take 32, 64"),
        (Model([3], dtype=BF16, changes={"d": 60}), None, "d = 60 is not divisible by 8"),
        (Model([3], dtype=BF16), other_strides, "keys and values differ in their strides"),
        (Model([3], dtype=BF16), one_tensor, "keys and values lie between each other"),
        (Model([3], dtype=BF16), off_boundary, "the cache does not start on 16 bytes"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_what_the_kernels_do_not_take(
    model: Model,
    spoil: Callable[[dict[str, Any]], None] | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASTRAI_DECODE", "composed")
    cache = model.paged()
    if spoil is not None:
        spoil(cache)
    chosen, why = reasons(model, cache)
    assert chosen == "torch" and words in why["composed"]


@pytest.mark.parametrize("page_size", [3, 512])
@pytest.mark.usefixtures("kernels")
def test_page_sizes_that_the_kernel_does_not_take(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAI_DECODE", "composed")
    model = Model([3], dtype=BF16)
    _, why = reasons(model, model.paged(page_size))
    assert why["composed"] == f"page_size = {page_size}: the kernel takes powers of two up to 256"


@pytest.mark.usefixtures("kernels")
def test_weights_that_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_DECODE", "composed")
    model = Model([3], dtype=BF16)
    layer = model.weights["layers"][0]
    layer["o"] = layer["o"].T.contiguous().T
    assert reasons(model)[1]["composed"] == "the rows of a weight are not contiguous"
    layer["o"] = layer["o"].contiguous()
    layer["up"] = torch.empty(layer["up"].numel() + 1, dtype=BF16)[1:].view_as(layer["up"])
    assert reasons(model)[1]["composed"] == "the rows of up or gate do not start on 16 bytes"
    layer["up"] = torch.zeros_like(layer["up"])
    layer["in_norm"] = layer["in_norm"].repeat_interleave(2)[::2]
    assert reasons(model)[1]["composed"] == "the weight of a norm is not contiguous"
