# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode on a GPU with the families installed: one CUDA graph of their kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import smollm
import torch
from decode_model import LLAMA3, Exact, Model, copy_of, relative, same_bits, take_back
from smollm import PROMPTS, ids_of
from tiny_llama import excess_ulps, tokens_of
from torch import Tensor

import astrai_core
from astrai_core import doctor, generate
from astrai_core._greedy import Decoding
from astrai_core.decode import build_model, decode_step, from_transformers, teardown

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = ("torch", "composed")
WIDE = {"d": 512, "ffn": 1000, "n_q": 8, "n_kv": 2, "hd": 64, "vocab": 1003}


def model_of(past: list[int], **options: Any) -> Model:
    return Model(past, dtype=torch.bfloat16, device="cuda", **options)


def build(model: Model, cache: Any, implementation: str = "composed") -> Any:
    with astrai_core.use(decode=implementation):
        return build_model(model.weights, cache, model.cfg, model.capacity)


@pytest.mark.parametrize(
    ("past", "changes", "kind", "page_size"),
    [
        ([9], {}, "paged", 8),
        ([9, 9], {**WIDE, "tied": False}, "paged", 16),
        ([20] * 8, {**WIDE, "rope_scaling": LLAMA3}, "paged", 32),
        ([9, 3, 21], {**WIDE, "hd": 128}, "paged", 1),
        ([9, 0, 21, 7, 30], {"hd": 256, "d": 72}, "paged", 256),
        ([9], WIDE, "contiguous", 0),
        ([9, 31, 2, 0], WIDE, "contiguous", 0),
    ],
)
def test_it_is_as_close_to_exact_as_torch(
    past: list[int], changes: dict[str, Any], kind: str, page_size: int
) -> None:
    model = model_of(past, changes=changes)
    exact = Exact(model)
    handles = {n: build(model, model.cache(kind, page_size), n) for n in IMPLEMENTATIONS}
    for step in range(4):
        ids, pos = model.tokens(), [p + step for p in past]
        form: int | Tensor = torch.tensor(pos, device="cuda")
        if len(set(pos)) == 1 and step % 2:
            form = pos[0]
        expected = exact.step(ids, pos)
        found = {n: relative(decode_step(h, ids, form), expected) for n, h in handles.items()}
        assert found["composed"] < 2 * found["torch"] + 2**-9, found
    for handle in handles.values():
        teardown(handle)


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_long_contexts(kind: str) -> None:
    model = model_of([3000, 4095], capacity=5000, changes=WIDE)
    exact = Exact(model)
    handles = {n: build(model, model.cache(kind, 128), n) for n in IMPLEMENTATIONS}
    ids, pos = model.tokens(), [3000, 4095]
    expected = exact.step(ids, pos)
    form = torch.tensor(pos, device="cuda")
    found = {n: relative(decode_step(h, ids, form), expected) for n, h in handles.items()}
    assert found["composed"] < 2 * found["torch"] + 2**-9, found


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_but_the_new_token_is_written(implementation: str, kind: str) -> None:
    model = model_of([13, 5], changes=WIDE)
    cache = model.cache(kind)
    before = copy_of(cache)
    handle = build(model, cache, implementation)
    torch.cuda.synchronize()
    assert same_bits(cache, before)
    weights = [x.clone() for layer in model.weights["layers"] for x in layer.values()]
    decode_step(handle, model.tokens(), torch.tensor([13, 5], device="cuda"))
    take_back(cache, before, [13, 5])
    assert same_bits(cache, before)
    now = [x for layer in model.weights["layers"] for x in layer.values()]
    assert all(map(torch.equal, weights, now))


def test_two_runs_are_bitwise_equal() -> None:
    model = model_of([1000, 900], capacity=1100, changes=WIDE)
    cache = model.paged(64)
    handles = [build(model, cache) for _ in range(2)]
    ids, pos = model.tokens(), torch.tensor([1000, 900], device="cuda")
    first = decode_step(handles[0], ids, pos)
    stored = copy_of(cache)
    for handle in handles * 5:
        assert torch.equal(decode_step(handle, ids, pos), first)
        assert same_bits(cache, stored)


def test_logits_are_the_callers_to_keep() -> None:
    model = model_of([3])
    handle = build(model, model.paged())
    first = decode_step(handle, model.tokens(), 3)
    kept = first.clone()
    decode_step(handle, model.tokens(), 4)
    assert torch.equal(first, kept)


def delay(milliseconds: int = 5) -> None:
    """Keeps the current stream busy for so long or a little longer."""
    torch.cuda._sleep(2_000_000 * milliseconds)


@pytest.mark.parametrize("on_device", [False, True])
def test_side_streams(on_device: bool) -> None:
    """Token and position are there late, on the stream of the step only."""
    model = model_of([100], capacity=120, changes=WIDE)
    steps = [(model.tokens(), pos) for pos in range(100, 110)]
    handles = [build(model, model.paged()) for _ in range(2)]
    expected = [decode_step(handles[0], ids, pos) for ids, pos in steps]
    late_ids, late_pos = torch.zeros_like(steps[0][0]), torch.zeros_like(steps[0][0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    found = []
    with torch.cuda.stream(side):
        for ids, pos in steps:
            delay()
            late_ids.copy_(ids)
            late_pos.fill_(pos)
            found.append(decode_step(handles[1], late_ids, late_pos if on_device else pos))
            late_ids.zero_()
            late_pos.zero_()
    side.synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_handle_that_is_dropped_while_it_runs(implementation: str) -> None:
    model = model_of([100], capacity=120, changes=WIDE)
    ids, caches = model.tokens(), [model.paged() for _ in range(2)]
    expected = decode_step(build(model, caches[0], implementation), ids, 100)
    handle = build(model, caches[1], implementation)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        delay(500)
        logits = decode_step(handle, ids, 100)
    del handle
    # The handle's memory would be among what this stream is given now.
    others = [
        torch.full((2**size,), torch.nan, device="cuda") for size in range(4, 19) for _ in range(16)
    ]
    torch.cuda.empty_cache()
    side.synchronize()
    assert torch.equal(logits, expected) and others


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_teardown_waits_for_every_stream(implementation: str) -> None:
    model = model_of([9], changes=WIDE)
    handle = build(model, model.paged(), implementation)
    # A kernel's first launch loads it, and waits for what runs; so does a copy from the host.
    ids = model.tokens()
    decode_step(handle, ids, 8)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        delay(200)
        decode_step(handle, ids, 9)
    assert not side.query()
    teardown(handle)
    assert side.query()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_in_a_graph_of_the_caller(implementation: str) -> None:
    model = model_of([9, 5], changes=WIDE)
    ids, pos = model.tokens(), torch.tensor([9, 5], device="cuda")
    plain, captured = (build(model, model.paged(), implementation) for _ in range(2))
    decode_step(captured, ids, pos)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decode_step(captured, ids, pos)
    for _ in range(3):
        graph.replay()
        expected = decode_step(plain, ids, pos)
        # cuBLAS may choose another kernel in a capture.
        assert relative(logits, expected.double()) <= (0.02 if implementation == "torch" else 0)
        pos += 1
        ids.copy_(model.tokens())


def test_nothing_is_built_in_a_capture() -> None:
    model = model_of([9])
    cache = model.paged()
    handle = build(model, cache)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")  # torch warns of a graph without anything in it
        with pytest.raises(RuntimeError, match=r"^build_model: expected no capture"):
            build(model, cache)
        with pytest.raises(RuntimeError, match=r"^teardown: expected no capture"):
            teardown(handle)
    assert decode_step(handle, model.tokens(), 9).isfinite().all()


OUT_OF_RANGE = """
import os, sys
sys.path.insert(0, {folder!r})
import torch
import astrai_core
from astrai_core.decode import build_model, decode_step
from decode_model import Model
model = Model([9], dtype=torch.bfloat16, device="cuda")
with astrai_core.use(decode={implementation!r}):
    handle = build_model(model.weights, model.cache({kind!r}), model.cfg, 40)
decode_step(handle, model.tokens(), 9)
torch.cuda.synchronize()
try:
    decode_step(handle, torch.tensor([{token}], device="cuda"), torch.tensor({pos}, device="cuda"))
    torch.cuda.synchronize()
except RuntimeError as error:
    print("device-side assert" in str(error), flush=True)
os._exit(0)  # CUDA is of no use any more, not even to be left
"""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("kind", "token", "pos"),
    [
        ("paged", 1, -1),
        ("contiguous", 1, -1),
        ("paged", 1, 40),
        ("paged", -1, 10),
        ("paged", 100, 10),
    ],
)
def test_what_is_out_of_range_is_an_assertion_of_the_device(
    implementation: str, kind: str, token: int, pos: int, run_python: Callable[..., str]
) -> None:
    folder = str(Path(__file__).parent)
    script = OUT_OF_RANGE.format(
        folder=folder, implementation=implementation, kind=kind, token=token, pos=pos
    )
    assert run_python(script).split() == ["True"]


def test_autocast_changes_nothing() -> None:
    model = model_of([9], changes=WIDE)
    ids = model.tokens()
    expected = decode_step(build(model, model.paged()), ids, 9)
    with torch.autocast("cuda", torch.float16):
        handle = build(model, model.paged())
        assert torch.equal(decode_step(handle, ids, 9), expected)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_does_not_wait_for_the_device(implementation: str) -> None:
    model = model_of([9, 9], changes=WIDE)
    handles = [build(model, model.cache(kind), implementation) for kind in ("paged", "contiguous")]
    ids, pos = model.tokens(), torch.tensor(10, device="cuda")
    for handle in handles:
        with no_waiting():
            decode_step(handle, ids, 9)
            decode_step(handle, ids, pos)


def test_teardown_gives_the_memory_back() -> None:
    model = model_of([9], changes={**WIDE, "d": 2048})
    cache = model.paged()
    before = torch.cuda.memory_allocated()
    handle = build(model, cache)
    assert torch.cuda.memory_allocated() > before
    teardown(handle)
    assert torch.cuda.memory_allocated() == before


def test_doctor_runs_a_step() -> None:
    report = doctor.diagnose()
    assert doctor.healthy(report)
    assert ("decode", "composed") in {(c["op"], c["chosen"]) for c in report["checks"]}


# --- a real model ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_generate_runs_kernels_whatever_the_table_says() -> None:
    network, _ = smollm.on_gpu()
    ids = torch.tensor([[1, 2, 3]], device="cuda")
    with astrai_core.explain() as report, generate.routed(network, 8) as forward:
        tokens_of(forward, ids, 4)
    assert any(row.chosen not in ("torch", "torch_native") for row in report.rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_differs_from_transformers_at_ties_only(
    prompt: str, implementation: str
) -> None:
    """On our own text, transformers' logit of our token is within 2 ulp of its largest."""
    network, tokenizer = smollm.on_gpu()
    ids = ids_of(tokenizer, prompt)
    with (
        astrai_core.use(decode=implementation),
        astrai_core.explain() as report,
        contextlib.closing(Decoding(from_transformers(network), ids.shape[-1] + 128)) as forward,
    ):
        tokens = tokens_of(forward, ids, 128)
    assert {row.chosen for row in report.rows if row.op == "decode"} == {implementation}
    assert excess_ulps(network, ids, tokens) <= 2
