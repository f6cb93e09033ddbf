# SPDX-License-Identifier: Apache-2.0
"""What makes the doctor find a machine unhealthy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from astrai_core import checks, doctor, policy
from conftest import NATIVE, Site, install_attention


@pytest.fixture
def gpu_of_cpu(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose calls run on the CPU."""
    gpus((9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(doctor, "_places", lambda: [torch.device("cpu")])


@pytest.mark.usefixtures("gpu_of_cpu")
def test_doctor_reports_a_call_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise ArithmeticError("no luck")

    monkeypatch.setattr(checks, "linear", fails)
    report = doctor.diagnose()
    (check,) = [c for c in report["checks"] if c["op"] == "linear"]
    assert check["error"] == "ArithmeticError: no luck" and check["chosen"] is None
    assert not doctor.healthy(report) and "no luck" in doctor._text(report)


@pytest.mark.usefixtures("gpu_of_cpu")
def test_doctor_reports_operands_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert doctor.healthy(doctor.diagnose())
    monkeypatch.setattr(Tensor, "to", full)
    report = doctor.diagnose()
    assert {c["error"] for c in report["checks"]} == {"OutOfMemoryError: CUDA out of memory"}
    assert not doctor.healthy(report) and "out of memory" in doctor._text(report)


@pytest.mark.usefixtures("gpu_of_cpu")
def test_a_wrong_variable_is_unhealthy_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_GEMV", "yes")
    assert not doctor.healthy(doctor.diagnose())


def test_a_broken_family_is_unhealthy_with_a_gpu_only(
    site: Site, gpus: Callable[..., None]
) -> None:
    site.add(CONTRACT=99)
    gpus()
    report = doctor.diagnose()
    assert doctor.healthy(report)
    assert not doctor.healthy({**report, "gpus": [{"index": 0}]})


ATTENTION = {
    "attn_decode": "cuda",
    "attn_paged_decode": "cuda",
    "attn_paged_prefill": "cuda",
    "attn_prefill": "cuda",
    "rotary_emb": "attention",
}


def of_attention(report: dict[str, Any]) -> dict[str, Any]:
    return {c["op"]: c for c in report["checks"] if c["op"] in ATTENTION}


@pytest.mark.usefixtures("gpu_of_cpu")
def test_attention_is_checked_where_there_are_kernels(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not of_attention(doctor.diagnose())
    native = install_attention(site)
    monkeypatch.setattr(Tensor, "get_device", lambda _: 0)
    report = doctor.diagnose()
    found = of_attention(report)
    assert {op: check["chosen"] for op, check in found.items()} == ATTENTION
    assert native.calls == [*ATTENTION]
    assert all(check["error"] is None for check in found.values())
    assert doctor.healthy(report) and "attn_paged_prefill cpu" in doctor._text(report)


@pytest.mark.usefixtures("gpu_of_cpu")
def test_only_the_ops_that_the_family_has_are_checked(site: Site) -> None:
    install_attention(site, OPS={"rotary_emb": ("bfloat16",), "attn_decode": ("bfloat16",)})
    report = doctor.diagnose()
    assert [*of_attention(report)] == ["attn_decode", "rotary_emb"]
    assert of_attention(report)["attn_decode"]["chosen"] == "torch_native"


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.usefixtures("gpu_of_cpu")
def test_a_kernel_of_attention_that_is_wrong(
    op: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = install_attention(site)
    right = getattr(native, op)
    monkeypatch.setattr(native, op, lambda *args, **options: 1.1 * right(*args, **options))
    monkeypatch.setattr(Tensor, "get_device", lambda _: 0)
    report = doctor.diagnose()
    wrong = [name for name, check in of_attention(report).items() if check["error"]]
    assert wrong == [op] and not doctor.healthy(report)


def test_a_kernel_that_is_not_the_first_choice_is_demanded(
    site: Site, seen_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del seen_as_gpu
    install_attention(site)
    monkeypatch.setenv("ASTR_BACKEND", "torch_native")
    place = torch.device("cpu")
    monkeypatch.setattr(checks, "_usable", lambda *_: True)
    found = [(c.op, c.demanded, c.chosen) for c in checks.checks_on(place) if c.op in ATTENTION]
    assert found[:2] == [("attn_decode", "auto", "torch_native"), ("attn_decode", "cuda", "cuda")]
    assert found[-1] == ("rotary_emb", "auto", "attention")


NORM = """
def add_rms_norm(x, residual, weight, eps, *, static_weights=False):
    s = x + residual
    wide = s.float()
    y = weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    return y, s
"""


def of_norm() -> tuple[str | None, str | None, str]:
    """What ran add_rms_norm, what is wrong with it, and why the other did not run."""
    (check,) = [c for c in checks.checks_on(torch.device("cpu")) if c.op == "add_rms_norm"]
    return check.chosen, check.error, *check.passed_over.values()


@pytest.mark.usefixtures("seen_as_gpu")
@pytest.mark.parametrize("result", [0, 1])
def test_add_rms_norm_is_checked_by_name(
    result: int, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [c for c in checks.checks_on(torch.device("cpu")) if c.op == "add_rms_norm"]
    native = site.native_of(
        site.add(native={"_native.py": NATIVE + NORM}, OPS={"add_rms_norm": ("bfloat16",)})
    )
    right = native.add_rms_norm
    assert of_norm() == ("gemv", None, "the kernel can serve the call")

    def wrong(*args: Any, **options: Any) -> list[Tensor]:
        results = [*right(*args, **options)]
        results[result] = 1.1 * results[result]
        return results

    monkeypatch.setattr(native, "add_rms_norm", wrong)
    policy.forget()
    chosen, error, _ = of_norm()
    assert chosen == "gemv" and error is not None and error.startswith("relative error 0.0")


def test_add_rms_norm_without_a_gpu_is_torchs(site: Site, gpus: Callable[..., None]) -> None:
    gpus()
    site.add(native={"_native.py": NATIVE + NORM}, OPS={"add_rms_norm": ("bfloat16",)})
    chosen, error, why = of_norm()
    assert (chosen, error) == ("torch", None) and why.startswith("torch ")
