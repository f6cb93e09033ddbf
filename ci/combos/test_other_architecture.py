# SPDX-License-Identifier: Apache-2.0
"""A wheel for another GPU than the one at hand: refused for that device, before any launch."""

import pytest
import torch

import astrai_gemv
from astrai_core import arch, device, discovery

OWN_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (8, 9)


@pytest.fixture
def family():
    return discovery.family("gemv")


def test_the_wheel_has_one_architecture(family):
    assert (family.sass, family.ptx) == (("89",), ())


@pytest.mark.parametrize(
    ("capability", "runs"), [((8, 0), False), ((8, 9), True), ((9, 0), False), ((12, 0), False)]
)
def test_which_devices_run_it(family, capability, runs):
    assert arch.has_sass(capability, family.sass) is runs
    assert not arch.has_ptx(capability, family.ptx)


def test_the_reason_on_a_device_that_does_not(family, monkeypatch):
    monkeypatch.setattr(device, "capability", lambda _index: (9, 0))
    reason = family.reason_on(0)
    assert reason.kind.value == "architecture"
    assert "cuda:0 is sm_90, this astrai-gemv wheel has code for 89; pip install" in reason.text


@pytest.mark.skipif(OWN_GPU, reason="the wheel's own GPU")
def test_torch_serves(calls, doctor, monkeypatch):
    monkeypatch.setenv("ASTRAI_GEMV", "1")
    calls()
    assert all(check["error"] is None for check in doctor.report["checks"])
    assert doctor.status == int(torch.cuda.is_available())


@pytest.mark.skipif(OWN_GPU or not torch.cuda.is_available(), reason="no GPU, or the wheel's own")
def test_the_family_itself_says_so_at_the_call():
    x, weight = (torch.ones(n, 64, device="cuda").bfloat16() for n in (2, 32))
    with torch.no_grad(), pytest.raises(RuntimeError, match="no code for this GPU"):
        astrai_gemv.bf16_gemv(x, weight)
