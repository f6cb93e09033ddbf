# SPDX-License-Identifier: Apache-2.0
"""When a handle's memory is given back; streams and captures of a GPU that is not there."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from decode_model import Model

import astrai_core
from astrai_core.decode import build_model, decode_step, teardown

IMPLEMENTATIONS = ("torch", "composed")
CUDA = torch.device("cuda", 0)


class Stream:
    """A stream that steps ran on."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("wait")


class Graph:
    """A graph that was captured, and what is asked of it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def replay(self) -> None:
        self.log.append("replay")

    def reset(self) -> None:
        self.log.append("reset")


def build(implementation: str = "composed") -> tuple[Model, Any]:
    model = Model([3], dtype=torch.bfloat16)
    with astrai_core.use(decode=implementation):
        return model, build_model(model.weights, model.paged(), model.cfg, model.capacity)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order. A wait for the whole device would wait for persistent kernels too."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: found.append("wait for the device"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


@pytest.mark.usefixtures("kernels")
def test_teardown_waits_for_the_steps_before_it_frees(log: list[str]) -> None:
    _, handle = build()
    decoder = handle._decoder
    handle._streams = {Stream(log), Stream(log)}
    decoder._captured = Graph(log), torch.zeros(1, 100)
    freed = weakref.ref(decoder)
    held = [weakref.ref(x) for x in decoder.tensors()]
    del decoder
    teardown(handle)
    assert log == ["wait", "wait", "reset"]
    assert freed() is None and not any(x() is not None for x in held)
    teardown(handle)
    assert log == ["wait", "wait", "reset"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("kernels")
def test_every_implementation_waits(implementation: str, log: list[str]) -> None:
    _, handle = build(implementation)
    handle._streams = {Stream(log)}
    teardown(handle)
    assert log == ["wait"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("kernels")
def test_nothing_is_torn_down_in_a_capture(
    implementation: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, handle = build(implementation)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^teardown: expected no capture of a CUDA graph to be"):
        teardown(handle)
    with pytest.raises(RuntimeError, match=r"^build_model: expected no capture"):
        build(implementation)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert log == []
    assert decode_step(handle, model.tokens(), 3).isfinite().all()
    teardown(handle)


@pytest.mark.usefixtures("kernels")
def test_a_teardown_that_fails_can_be_repeated(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("no luck")

    _, handle = build()
    handle._streams = {Stream(log)}
    handle._decoder._captured = Graph(log), torch.zeros(1, 100)
    with monkeypatch.context() as patched:
        patched.setattr(Stream, "synchronize", fails)
        with pytest.raises(RuntimeError, match="no luck"):
            teardown(handle)
    teardown(handle)
    assert log == ["wait", "reset"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("kernels", "log")
def test_what_is_allocated_is_kept_once_for_each_stream(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = build(implementation)
    handle._device = CUDA
    kept: list[tuple[int, str]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: kept.append((x.data_ptr(), stream))
    )
    stream = "first"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    ours = {x.data_ptr() for x in handle._decoder.tensors()}
    for stream in ("first", "second", "first"):  # noqa: B007 (current_stream reads it)
        handle._keep_for_stream(handle._decoder)
    assert {*kept} == {(x, name) for x in ours for name in ("first", "second")}
    assert len(kept) == 2 * len(handle._decoder.tensors())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    stream = "captured"
    handle._keep_for_stream(handle._decoder)
    assert "captured" not in {name for _, name in kept}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("kernels")
def test_all_that_is_allocated_is_named(implementation: str) -> None:
    """Every tensor of a decoder is the caller's, or one of `tensors`."""
    model, handle = build(implementation)
    callers = memory_of(model.weights)
    named = memory_of(handle._decoder.tensors())
    # The pages hold the caller's pools too.
    held = {name: x for name, x in vars(handle._decoder).items() if name != "_pages"}
    assert memory_of(held) - callers <= named and named.isdisjoint(callers)


def memory_of(x: Any) -> set[int]:
    """Where the tensors in dicts, lists and tuples begin."""
    if isinstance(x, torch.Tensor):
        return {x.untyped_storage().data_ptr()}
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return set().union(*map(memory_of, parts))
