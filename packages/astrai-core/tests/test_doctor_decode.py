# SPDX-License-Identifier: Apache-2.0
"""The doctor's steps of whole-model decode, by stand-ins."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from astrai_core import checks, policy
from conftest import Site

MEGAKERNEL = """
import types
from astrai_core.decode._arguments import Problem
from astrai_core.decode._torch import TorchDecoder
decode = types.SimpleNamespace(
    unsupported=lambda *_: None,
    build_model=lambda *arguments: TorchDecoder(Problem.parse(*arguments)),
    decode_step=lambda handle, *arguments: handle.step(*arguments),
)
"""


@pytest.fixture(autouse=True)
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_usable", lambda *_: True)


def found() -> list[tuple[str, str | None, bool]]:
    ours = [c for c in checks.checks_on(torch.device("cpu")) if c.op == "decode"]
    return [(c.demanded, c.chosen, c.error is None) for c in ours]


@pytest.mark.usefixtures("kernels")
def test_what_the_measured_table_prefers_is_checked_once() -> None:
    assert found() == [("auto", "composed", True)]


@pytest.mark.usefixtures("preferred")
def test_a_step_of_composed_decode(
    kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernels["gemv"].add_rms_norm
    assert found() == [("auto", "torch", True), ("composed", "composed", True)]

    def wrong(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        y, s = right(x, *args, **options)
        return 1.1 * y, s

    monkeypatch.setattr(kernels["gemv"], "add_rms_norm", wrong)
    policy.forget()
    assert found() == [("auto", "torch", True), ("composed", "composed", False)]


def test_a_family_that_lacks_an_op_is_not_asked_to_decode(
    kernels: dict[str, ModuleType], site: Site
) -> None:
    del kernels
    site.add(OPS={"bf16_gemv": ("bfloat16",), "bf16_swiglu": ("bfloat16",)})
    assert found() == [("auto", "torch", True)]


@pytest.mark.usefixtures("seen_as_gpu")
def test_a_step_of_the_megakernel_where_it_takes_the_model(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = site.add(
        "megakernel", native={"_native.py": MEGAKERNEL}, OPS={"decode": ("bfloat16",)}
    )
    native = site.native_of(package)
    assert found() == [("auto", "torch", True), ("megakernel", "megakernel", True)]
    monkeypatch.setattr(native.decode, "decode_step", lambda *_: None)
    assert found() == [("auto", "torch", True), ("megakernel", None, False)]
    monkeypatch.setattr(native.decode, "unsupported", lambda *_: "it takes 16 layers")
    assert found() == [("auto", "torch", True)]
