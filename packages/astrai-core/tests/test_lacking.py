# SPDX-License-Identifier: Apache-2.0
"""Installations that lack something, and what is said about them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any, NoReturn

import pytest
import torch

import astrai_core
from astrai_core import discovery, doctor
from astrai_core.reasons import ReasonKind
from conftest import NATIVE, Site


def outcomes() -> dict[str, tuple[str, str]]:
    """What ran each op, and why the other implementation did not."""
    x, up, gate = (torch.ones(s).bfloat16() for s in ((2, 8), (4, 8), (4, 8)))
    with torch.no_grad(), astrai_core.explain() as report:
        astrai_core.linear(x, up)
        astrai_core.swiglu(x, up, gate)
    return {row.op: (row.chosen, *row.passed_over.values()) for row in report.rows}


@pytest.mark.usefixtures("seen_as_gpu")
def test_a_lacking_op_disables_that_op_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    monkeypatch.setenv("ASTRAI_SWIGLU", "1")
    native = {"_native.py": NATIVE.replace("bf16_swiglu", "of_old")}
    for ops in ({"bf16_gemv": ("bfloat16",)}, {"bf16_swiglu": (), "bf16_gemv": ("bfloat16",)}):
        site.add(OPS=ops, native=native)
        found = outcomes()
        assert found["linear"][0] == "gemv"
        assert found["swiglu"] == (
            "torch",
            "astrai-gemv 0.1.0 has no bf16_swiglu for bfloat16; pip install -U astrai-gemv",
        )


@pytest.mark.parametrize("ops", [{"f": "bfloat16"}, {"f": (16,)}, {1: ()}, {"f": None}])
def test_a_manifest_with_wrong_ops(site: Site, ops: Any) -> None:
    site.add(OPS=ops)
    reason = discovery.family("gemv").reason
    assert reason is not None and reason.kind is ReasonKind.BAD_MANIFEST
    assert "OPS: expected a tuple of dtype names for each op, got" in reason.text


@pytest.mark.usefixtures("seen_as_gpu")
@pytest.mark.parametrize("mode", ["1", "auto"])
def test_a_source_tree_without_metadata(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setenv("ASTRAI_GEMV", mode)
    monkeypatch.setattr(importlib.metadata, "metadata", absent)
    assert astrai_core.families() == ()
    chosen, why = outcomes()["linear"]
    assert chosen == "torch"
    assert why == str(discovery.find("gemv").reason)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_no_command_is_promised_where_an_extra_is_empty(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    reason = discovery.find("gemv").reason
    assert reason is not None and reason.kind is ReasonKind.NOT_INSTALLED
    assert reason.text == f"astrai-gemv is not made for {system} on {machine}"


def test_the_doctor_names_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "yes")
    report = doctor.diagnose()
    message = "ASTRAI_GEMV: expected 0, 1 or auto, got 'yes'"
    others = {"ASTRAI_SWIGLU": "auto", "ASTRAI_DECODE": "auto"}
    assert report["selection"] == {"ASTRAI_GEMV": message, **others}
    assert message in doctor._text(report)
    assert doctor.healthy(report)  # there is no GPU that a family could not run on


def test_the_version_is_that_of_the_distribution() -> None:
    assert astrai_core.__version__ == importlib.metadata.version("astrai-core")
    with pytest.raises(AttributeError, match="'astrai_core' has no attribute 'absent'"):
        _ = astrai_core.absent
