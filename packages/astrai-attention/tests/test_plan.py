# SPDX-License-Identifier: Apache-2.0
"""Launch plans are pure functions: tested for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_attention import _attention

KB = 1024
H200 = _attention.DeviceInfo(
    sm_count=132, device_arch=90, image_arch=90, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
# compute_80 PTX compiled by the driver of the same GPU.
H200_PTX80 = _attention.DeviceInfo(
    sm_count=132, device_arch=90, image_arch=80, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
L20 = _attention.DeviceInfo(
    sm_count=92, device_arch=89, image_arch=89, smem_per_sm=100 * KB, smem_per_block=99 * KB
)
DEVICES = {"h200": H200, "h200-ptx80": H200_PTX80, "l20": L20}


def plan(device: Any = H200, **changes: Any) -> dict[str, Any]:
    problem = {"tokens": 1, "heads": 32, "head_dim": 128, "interleaved": False}
    return _attention.plan_rotary(**{**problem, **changes}, device=device)


@pytest.mark.parametrize(
    ("tokens", "heads", "heads_per_thread"),
    [
        (1, 32, 1),
        (16, 32, 1),
        (528, 32, 1),
        (1056, 32, 2),
        (2112, 32, 4),
        (1 << 20, 1, 1),
        (1 << 20, 2, 2),
        (1 << 20, 3, 2),
        (1 << 20, 5, 4),
    ],
)
def test_a_thread_takes_more_heads_once_the_gpu_is_full(
    tokens: int, heads: int, heads_per_thread: int
) -> None:
    assert plan(tokens=tokens, heads=heads)["heads_per_thread"] == heads_per_thread


@pytest.mark.parametrize(("interleaved", "vectors"), [(False, 8), (True, 16)])
def test_a_decode_step_is_spread_over_sms(interleaved: bool, vectors: int) -> None:
    found = plan(interleaved=interleaved)
    assert found["block"] == (vectors, 64 // vectors, 1)
    assert found["grid"] == (1, 32 * vectors // 64)


def test_a_prompt_has_full_ctas() -> None:
    assert plan(tokens=8192)["block"] == (8, 8, 4)
    assert plan(tokens=8192)["grid"] == (2048, 1)


def test_tiles_of_groups_are_of_one_size() -> None:
    found = plan(heads=33, head_dim=512, interleaved=True, tokens=100_000)
    assert (found["groups"], found["block"], found["grid"]) == (9, (64, 3, 1), (100_000, 3))


def test_dependent_launch_follows_the_image_not_the_gpu() -> None:
    # compute_80 code has no griddepcontrol.wait: launched early, it would read too early.
    assert plan(H200)["programmatic"] is True
    assert plan(H200_PTX80)["programmatic"] is False
    assert plan(L20)["programmatic"] is False


@given(
    tokens=st.integers(1, 2**31 - 1) | st.integers(1, 5000),
    heads=st.integers(1, 65535) | st.integers(1, 128),
    head_dim=st.integers(1, 32).map(lambda n: 16 * n),
    interleaved=st.booleans(),
    name=st.sampled_from(sorted(DEVICES)),
)
def test_any_problem_is_covered_within_the_limits_of_cuda(
    tokens: int, heads: int, head_dim: int, interleaved: bool, name: str
) -> None:
    found = plan(
        DEVICES[name], tokens=tokens, heads=heads, head_dim=head_dim, interleaved=interleaved
    )
    x, y, z = found["block"]
    across, down = found["grid"]
    per_thread, groups = found["heads_per_thread"], found["groups"]
    assert x * (8 if interleaved else 16) == head_dim
    assert x * y * z <= 256 and z <= 64
    assert across <= 2**31 - 1 and down <= 65535
    # Every token and every group has a thread; no tile is all overhang.
    assert (across - 1) * z < tokens <= across * z
    assert (down - 1) * y < groups <= down * y
    # A thread's first head always exists, its last one where the groups divide the heads.
    assert groups <= heads <= groups * per_thread < heads + per_thread


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens: expected 1..2147483647, got 0"),
        ({"tokens": 2**31}, "tokens: expected 1..2147483647, got 2147483648"),
        ({"heads": 0}, "heads: expected 1..65535, got 0"),
        ({"heads": 65536}, "heads: expected 1..65535, got 65536"),
        ({"head_dim": 8}, "head_dim: expected a multiple of 16 in 16..512, got 8"),
        ({"head_dim": 24}, "head_dim: expected a multiple of 16 in 16..512, got 24"),
        ({"head_dim": 528}, "head_dim: expected a multiple of 16 in 16..512, got 528"),
    ],
)
def test_impossible_problems(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)
