# SPDX-License-Identifier: Apache-2.0
"""Two families in one process: healthy together, each with C++ types and state of its own."""

import pytest
import torch

FAMILIES = ("attention", "gemv")


def test_the_extras_brought_both(installed):
    assert installed == {"astrai-core", *(f"astrai-{name}" for name in FAMILIES)}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_healthy(doctor, name):
    found = doctor.family(name)
    assert found["reason"] is None and found["version"] and found["ops"]
    assert doctor.status == 0


@pytest.mark.parametrize("order", [FAMILIES, FAMILIES[::-1]], ids="-then-".join)
def test_both_modules_load(order, python):
    lines = [f"import astrai_{name}._{name} as {name}" for name in order]
    code = "\n".join([*lines, "print(attention.DeviceInfo is gemv.DeviceInfo)"])
    assert python(code) == "False\n"


def test_an_op_of_each_refuses_a_call_off_the_gpu():
    from astrai_attention import rotary_emb
    from astrai_gemv import bf16_gemv

    x, angles = torch.ones(2, 1, 16).bfloat16(), torch.ones(2, 8)
    for call in (
        lambda: rotary_emb(x, angles, angles, interleaved=True),
        lambda: bf16_gemv(x[:, 0], x[:, 0]),
    ):
        with pytest.raises(ValueError, match="x: expected a CUDA tensor, got one on the CPU"):
            call()
