# SPDX-License-Identifier: Apache-2.0
"""Which way `generate` decodes a model: as a whole or by its layers; on a GPU that is not there."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_llama import llama
from transformers import LlamaForCausalLM

import astrai_core
from astrai_core import generate
from astrai_core._greedy import Decoding


@pytest.fixture
def on_gpu(kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors and models seem to be on a GPU, for which the families are installed."""
    del kernels
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda", 0))


def route() -> tuple[str | None, Any]:
    """The implementation that decodes the whole model, or None where layers are routed."""
    with astrai_core.explain() as report, generate.routed(llama(dtype=torch.bfloat16), 20) as way:
        return (way.implementation if isinstance(way, Decoding) else None), report


def test_on_the_cpu_torch_decodes_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert route()[0] == "torch"
    assert capsys.readouterr().out == "through astrai_core.decode: all 2 layers, by torch\n"


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_the_measured_table_decodes_by_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    way, report = route()
    assert way == "composed"
    assert capsys.readouterr().out == "through astrai_core.decode: all 2 layers, by composed\n"
    assert report.rows[0].passed_over["torch"] == "the measured table prefers composed"


@pytest.mark.usefixtures("on_gpu", "preferred")
def test_on_a_gpu_layers_are_routed_where_torch_would_decode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    way, report = route()
    assert way is None
    lines = capsys.readouterr().out.splitlines()
    why = "no measurement on sm_90 prefers it (ASTRAI_DECODE=composed forces it)"
    assert lines[0].startswith(f"not through astrai_core.decode: composed: {why}; megakernel: ")
    assert lines[1].startswith("through astrai_core: 15 linears")
    (row,) = report.rows
    assert (row.op, row.chosen, row.passed_over["composed"]) == ("decode", "torch", why)


@pytest.mark.parametrize("implementation", ["torch", "composed"])
@pytest.mark.parametrize("by", ["environment", "context"])
@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_what_is_asked_for_decodes(
    implementation: str,
    by: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if by == "environment":
        monkeypatch.setenv("ASTRAI_DECODE", implementation)
        assert route()[0] == implementation
    else:
        with astrai_core.use(decode=implementation):
            assert route()[0] == implementation
    printed = f"through astrai_core.decode: all 2 layers, by {implementation}\n"
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_layers_are_routed_where_what_is_asked_for_cannot_decode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASTRAI_DECODE", "megakernel")
    assert route()[0] is None
    assert "megakernel: astrai-megakernel is not installed" in capsys.readouterr().out


def test_the_handle_is_torn_down_after_an_error() -> None:
    with (
        pytest.raises(ArithmeticError, match="no luck"),
        generate.routed(llama(), 20) as forward,
    ):
        raise ArithmeticError("no luck")
    forward(torch.tensor([[1, 2]]))  # the prompt needs no handle
    with pytest.raises(RuntimeError, match="got one after teardown"):
        forward(torch.tensor([[1]]))


def test_more_than_one_token_after_the_prompt_is_refused() -> None:
    with generate.routed(llama(), 20) as forward:
        forward(torch.tensor([[1, 2, 3]]))
        with pytest.raises(
            ValueError, match=r"ids: expected \[1, 1\] after the prompt, got \[1, 2"
        ):
            forward(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("variable", ["ASTRAI_DECODE", "ASTRAI_GEMV"])
def test_a_variable_of_another_value_is_one_sentence(
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "yes")
    monkeypatch.setattr(generate, "load", lambda *_: (llama(), None))
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    assert generate.run(parser.parse_args(["--model", "none"])) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"astrai_core generate: {variable}: expected ")
