# SPDX-License-Identifier: Apache-2.0
"""Selection: context > environment > table > torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from astrai_core import policy, use
from astrai_core.policy import Call, decide
from conftest import Site


@pytest.fixture(autouse=True)
def _h200(site: Site, gpus: Callable[..., None]) -> None:
    site.add()
    gpus((9, 0))


def call(op: str = "linear", m: int = 2, n: int = 4096, k: int = 4096, **changes: Any) -> Call:
    described = Call(op, policy.selected(op), policy.mode(op), 0, m, n, k, None)
    return described._replace(**changes)


def chosen(*args: Any, **kwargs: Any) -> str:
    return decide(call(*args, **kwargs)).chosen


def test_the_table_selects() -> None:
    assert chosen() == "gemv"
    assert chosen(n=28672, k=8192, m=8) == "gemv"
    assert chosen("swiglu", n=28672, k=8192, m=8) == "gemv"
    assert chosen("swiglu", n=8191, k=8192) == "torch"
    why = decide(call("swiglu", n=8191, k=8192)).passed_over["gemv"]
    assert "outside the bands of sm_90" in why
    assert "ASTRAI_SWIGLU=1" in why


def test_environment_over_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "0")
    assert decide(call()) == ("torch", None, {"gemv": "ASTRAI_GEMV=0"})
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    assert chosen(n=28672, k=8192, m=8) == "gemv"
    assert chosen("swiglu", n=4096, k=8192) == "torch"
    monkeypatch.setenv("ASTRAI_SWIGLU", "1")
    assert chosen("swiglu", n=4096, k=8192) == "gemv"


@pytest.mark.parametrize("value", ["", "yes", "2", "AUTO"])
def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ASTRAI_SWIGLU", value)
    with pytest.raises(ValueError, match=f"ASTRAI_SWIGLU: expected 0, 1 or auto, got '{value}'"):
        call("swiglu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"m": 9}, "M = 9"),
        ({"m": 0}, "M = 0"),
        ({"n": 0}, "nothing to compute"),
        ({"n": 1, "k": 2**27 + 8}, "K to 134217728"),
        ({"op": "swiglu", "k": 60}, "K = 60 is not divisible by 8"),
        ({"gpu": -1}, "not on a CUDA device"),
        ({"obstacle": "training"}, "training"),
    ],
)
def test_forced_still_falls_back(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    monkeypatch.setenv("ASTRAI_SWIGLU", "1")
    decision = decide(call(**changes))
    assert (decision.chosen, decision.kernel) == ("torch", None)
    assert words in decision.passed_over["gemv"]


def test_context_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "0")
    with use(linear="gemv"):
        assert chosen() == "gemv"
        with use(linear="torch"):
            assert chosen() == "torch"
        assert chosen() == "gemv"
    assert chosen() == "torch"


def test_context_is_strict() -> None:
    with use(linear="gemv"), pytest.raises(RuntimeError, match=r"gemv is demanded by use.*M = 9"):
        decide(call(m=9))
    with pytest.raises(KeyError), use(linear="gemv"):
        raise KeyError
    assert policy.selected("linear") is None


def test_context_names() -> None:
    with pytest.raises(ValueError, match="expected an op of linear, swiglu, decode, got 'matmul'"):
        use(matmul="torch").__enter__()
    with pytest.raises(ValueError, match="linear: expected one of torch, gemv, got 'cublas'"):
        use(linear="cublas").__enter__()


def test_context_is_per_thread_and_task() -> None:
    seen: list[str | None] = []

    async def task(implementation: str) -> str | None:
        with use(linear=implementation):
            await asyncio.sleep(0)
            return policy.selected("linear")

    async def both() -> list[str | None]:
        return list(await asyncio.gather(task("torch"), task("gemv")))

    with use(linear="gemv"):
        thread = threading.Thread(target=lambda: seen.append(policy.selected("linear")))
        thread.start()
        thread.join()
    assert seen == [None]
    assert asyncio.run(both()) == ["torch", "gemv"]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("float32 operands", {"x": torch.ones(2, 8)}),
        ("not contiguous", {"x": torch.ones(8, 2, dtype=torch.bfloat16).t()}),
        ("rows of a weight", {"w": torch.ones(8, 4, dtype=torch.bfloat16).t()}),
        ("bias is not contiguous", {"b": torch.ones(8, dtype=torch.bfloat16)[::2]}),
        ("requires grad", {"w": torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)}),
    ],
)
def test_obstacles_in_tensors(
    words: str, changes: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = {"x": torch.ones(2, 8), "w": torch.ones(4, 8), "b": torch.ones(4)}
    t = {**{name: value.bfloat16() for name, value in ones.items()}, **changes}
    assert words in str(policy.obstacle_in(t["x"], (t["w"],), t["b"]))
    t = {name: value.bfloat16() for name, value in ones.items()}
    assert policy.obstacle_in(t["x"], (t["w"],), t["b"]) is None
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert policy.obstacle_in(t["x"], (t["w"],), None) == "autocast is active"
