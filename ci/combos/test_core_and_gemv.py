# SPDX-License-Identifier: Apache-2.0
"""Core with the family that its extra brought: used where there is a GPU, torch elsewhere."""

import pytest
import torch


def test_the_extra_brought_the_family(installed):
    assert installed == {"astrai-core", "astrai-gemv"}


def test_the_family_is_healthy(doctor):
    assert doctor.status == 0
    assert doctor.gemv["reason"] is None
    assert doctor.gemv["version"]
    assert {"bf16_gemv", "bf16_swiglu"} <= doctor.gemv["ops"].keys()
    assert all(check["error"] is None for check in doctor.report["checks"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel may serve")
@pytest.mark.parametrize("mode", ["0", "1", "auto"])
def test_torch_serves_off_the_gpu(calls, monkeypatch, mode):
    monkeypatch.setenv("ASTRAI_GEMV", mode)
    monkeypatch.setenv("ASTRAI_SWIGLU", mode)
    for row in calls():
        expected = f"ASTRAI_{'GEMV' if row.op == 'linear' else 'SWIGLU'}=0"
        assert row.passed_over["gemv"] == (expected if mode == "0" else "x is not on a CUDA device")
