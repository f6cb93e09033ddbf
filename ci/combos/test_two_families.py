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


@pytest.mark.parametrize("tile_rows", [None, 1, 3, 16, 64, 128])
def test_core_cuts_queries_into_tiles_as_the_family_does(tile_rows):
    from astrai_attention import q_tile_schedule as expected
    from astrai_attention._family import Q_TILE_ROWS
    from astrai_core.attn import q_tile_schedule as found

    rows = tile_rows or Q_TILE_ROWS
    generator = torch.Generator().manual_seed(rows)
    batches = [[], [0], [0, 0, 0]]
    for number in range(300):
        size = (number % 9,)
        anywhere = torch.randint(0, 4 * rows, size, generator=generator)
        # Multiples of a tile's rows, and the lengths beside them.
        edges = anywhere // rows * rows + torch.randint(-1, 2, size, generator=generator)
        batches += [anywhere.tolist(), edges.clamp(min=0).tolist()]
    for q_lens in batches:
        # What a step uploads, and what a call of the family without its second argument gives.
        theirs = expected(q_lens) if tile_rows is None else expected(q_lens, rows)
        assert tuple(map(list, found(q_lens, rows))) == tuple(map(list, theirs)), q_lens


@pytest.mark.parametrize("call", [([2, -1], 64), ([1], 0), ([1], -1)])
def test_both_refuse_what_makes_no_tiles(call):
    from astrai_attention import q_tile_schedule as family
    from astrai_core.attn import q_tile_schedule as core

    for schedule in (family, core):
        with pytest.raises(ValueError, match="expected"):
            schedule(*call)
