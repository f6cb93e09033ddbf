# SPDX-License-Identifier: Apache-2.0
"""Launch plans of decode attention are pure functions: tested for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_attention import _attention
from kernelkit import wheels

KB = 1024
HEADS = 8  # query heads of a CTA
H200 = _attention.DeviceInfo(
    sm_count=132, device_arch=90, image_arch=90, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
# compute_80 PTX compiled by the driver of the same GPU.
H200_PTX80 = _attention.DeviceInfo(
    sm_count=132, device_arch=90, image_arch=80, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
A100 = _attention.DeviceInfo(
    sm_count=108, device_arch=80, image_arch=80, smem_per_sm=164 * KB, smem_per_block=163 * KB
)
L20 = _attention.DeviceInfo(
    sm_count=92, device_arch=89, image_arch=89, smem_per_sm=100 * KB, smem_per_block=99 * KB
)
B200 = _attention.DeviceInfo(
    sm_count=148, device_arch=100, image_arch=100, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
RTX_5090 = _attention.DeviceInfo(
    sm_count=170, device_arch=120, image_arch=120, smem_per_sm=100 * KB, smem_per_block=99 * KB
)
DEVICES = {
    "h200": H200,
    "h200-ptx80": H200_PTX80,
    "a100": A100,
    "l20": L20,
    "b200": B200,
    "rtx5090": RTX_5090,
}


def plan(device: Any = H200, **changes: Any) -> dict[str, Any]:
    problem = {"batch": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "max_length": 512}
    return _attention.plan_decode(**{"is_exact": False, **problem, **changes}, device=device)


@pytest.mark.parametrize(
    ("max_length", "parts"),
    [(0, 1), (1, 1), (128, 1), (129, 2), (256, 2), (385, 4), (512, 4), (1024, 8), (2048, 8)],
)
def test_short_sequences_get_a_cluster(max_length: int, parts: int) -> None:
    found = plan(max_length=max_length)
    assert (found["parts"], found["splits"], found["grid"]) == (parts, 1, 8 * parts)
    assert found["workspace_bytes"] == 0


@pytest.mark.parametrize(
    ("changes", "programmatic"),
    [
        ({"max_length": 65536, "is_exact": True}, False),
        ({"max_length": 65536}, True),
        ({"max_length": 65535, "is_exact": True}, True),
        # No split: more sequences than CTAs find a place for.
        ({"max_length": 65536, "is_exact": True, "batch": 64}, True),
    ],
)
def test_long_sequences_whose_lengths_are_known_follow_the_kernel_before(
    changes: dict[str, Any], programmatic: bool
) -> None:
    assert plan(**changes)["programmatic"] is programmatic
    assert plan(A100, **changes)["programmatic"] is False


def test_long_sequences_get_the_whole_gpu() -> None:
    found = plan(max_length=3073)
    assert (found["parts"], found["splits"], found["grid"]) == (1, 16, 128)
    assert found["merges_inside"]
    assert found["workspace_bytes"] == 4 * 128 * HEADS * (128 + 2)
    # No split without tokens: 3073 are 25 rounds of 8 warps with 16 tokens each.
    assert plan(max_length=3073, kv_heads=1, q_heads=4)["splits"] == 25
    assert plan(max_length=1 << 20, kv_heads=1, q_heads=4)["splits"] == 132


@pytest.mark.parametrize(
    ("kv_heads", "splits", "merges_inside"), [(1, 132, False), (4, 33, False), (5, 26, True)]
)
def test_of_very_many_splits_a_second_kernel_adds_the_sums(
    kv_heads: int, splits: int, merges_inside: bool
) -> None:
    found = plan(max_length=1 << 20, kv_heads=kv_heads, q_heads=kv_heads)
    assert (found["splits"], found["merges_inside"]) == (splits, merges_inside)
    assert found["merge_grid"] == kv_heads and plan(max_length=16)["merge_grid"] == 0
    assert not plan(max_length=16)["merges_inside"]


@pytest.mark.parametrize(
    ("batch", "max_length", "parts", "splits"),
    [
        (1, 3072, 8, 1),
        (1, 3073, 1, 16),
        (2, 512, 4, 1),
        (2, 1024, 1, 8),
        (4, 256, 2, 1),
        (4, 512, 1, 4),
        (8, 1024, 2, 1),
        (8, 1 << 20, 2, 1),
        (5, 1 << 20, 1, 3),
        (16, 1 << 20, 1, 1),
    ],
)
def test_no_cluster_waits_for_a_place(batch: int, max_length: int, parts: int, splits: int) -> None:
    """Of 4 and 8 CTAs three quarters of the GPU at most, or they would run in two waves."""
    found = plan(batch=batch, max_length=max_length)
    assert (found["parts"], found["splits"]) == (parts, splits)


@pytest.mark.parametrize("name", ["h200-ptx80", "a100", "l20"])
@pytest.mark.parametrize("max_length", [512, 2048])
def test_older_images_have_no_clusters(name: str, max_length: int) -> None:
    found = plan(DEVICES[name], max_length=max_length)
    assert found["parts"] == 1
    assert 8 <= found["splits"] <= DEVICES[name].sm_count // 8
    assert found["grid"] == 8 * found["splits"]


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "groups"),
    [(8, 8, 1), (8, 1, 1), (9, 1, 2), (16, 1, 2), (17, 1, 3), (71, 1, 9), (32, 8, 1), (36, 2, 3)],
)
def test_groups_of_more_than_eight_query_heads(q_heads: int, kv_heads: int, groups: int) -> None:
    found = plan(q_heads=q_heads, kv_heads=kv_heads, max_length=16)
    assert found["head_groups"] == groups
    assert found["grid"] == kv_heads * groups


@pytest.mark.parametrize(
    ("head_dim", "batch", "warps"),
    [(32, 1, 8), (64, 1, 8), (128, 1, 8), (128, 32, 8), (128, 33, 4), (256, 1, 4), (256, 64, 4)],
)
def test_many_units_get_small_ctas(head_dim: int, batch: int, warps: int) -> None:
    """Two for every SM from 264 units on, where head_dim leaves room."""
    found = plan(head_dim=head_dim, batch=batch)
    assert found["warps"] == warps
    if warps == 4 and head_dim == 128:
        assert 2 * (found["smem_bytes"] + KB) <= H200.smem_per_sm


def test_the_module_holds_the_body_that_its_plans_name() -> None:
    """And no other."""
    prefill = _attention.plan_prefill(
        batch=1, q_len=64, kv_len=64, q_tiles=0, q_heads=8, kv_heads=8, head_dim=128,
        masked=False, device=H200,
    )  # fmt: skip
    assert plan()["body"] == prefill["body"]
    kernels = {
        "mma.sync": {"7MmaWarp", "14prefill_kernel"},
        "scalar": {"10ScalarWarp", "21prefill_scalar_kernel"},
    }
    # Mangled names, by which the runtime finds a kernel.
    code = wheels.path_of("astrai_attention._attention").read_bytes()
    for body, names in kernels.items():
        there = {name for name in names if name.encode() in code}
        assert there == (names if body == plan()["body"] else set())


def test_dependent_launch_follows_the_image_not_the_gpu() -> None:
    # compute_80 code has no griddepcontrol.wait: launched early, it would read too early.
    assert plan(H200)["programmatic"] is True
    assert plan(H200_PTX80)["programmatic"] is False
    assert plan(L20)["programmatic"] is False


@given(
    batch=st.integers(1, 64) | st.integers(1, 100_000),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8, 32, 128]),
    group=st.integers(1, 20) | st.sampled_from([32, 64, 71, 128]),
    head_dim=st.sampled_from([32, 64, 128, 256]),
    max_length=st.integers(0, 5000) | st.integers(0, 1 << 30),
    name=st.sampled_from(sorted(DEVICES)),
)
def test_any_problem_is_covered_within_the_limits_of_the_device(
    batch: int, kv_heads: int, group: int, head_dim: int, max_length: int, name: str
) -> None:
    device = DEVICES[name]
    found = plan(
        device,
        batch=batch,
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=max_length,
    )
    groups, parts, splits = found["head_groups"], found["parts"], found["splits"]
    # Every query head has a CTA, and every CTA a query head.
    assert (groups - 1) * HEADS < group <= groups * HEADS
    units = batch * kv_heads * groups
    assert found["grid"] == units * parts * splits < 2**31
    assert parts in ((1, 2, 4, 8) if device.image_arch >= 90 else (1,))
    assert splits == 1 or parts == 1
    # Tokens are shared out within one wave of CTAs, and only as far as there is a tile for each.
    tile = found["warps"] * (32 if head_dim <= 64 else 16)
    if parts * splits > 1:
        assert found["grid"] <= device.sm_count * (2 if found["warps"] == 4 else 1)
        assert (parts * splits - 1) * tile < max_length
    assert found["workspace_bytes"] == (
        4 * found["grid"] * HEADS * (head_dim + 2) if splits > 1 else 0
    )
    assert found["warps"] in ((2, 4) if head_dim == 256 else (4, 8))
    assert found["smem_bytes"] <= device.smem_per_block
    assert found["smem_bytes"] + KB <= device.smem_per_sm
    assert found["programmatic"] is (device.image_arch >= 90)


@given(max_length=st.integers(0, 1 << 20), more=st.integers(0, 1 << 20))
def test_longer_sequences_never_get_fewer_ctas(max_length: int, more: int) -> None:
    short, long = plan(max_length=max_length), plan(max_length=max_length + more)
    assert long["grid"] >= short["grid"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"q_heads": 0}, "q_heads: expected at least 1, got 0"),
        ({"kv_heads": 0}, "kv_heads: expected at least 1, got 0"),
        ({"kv_heads": 5}, "q_heads: expected a multiple of kv_heads = 5, got 32"),
        ({"kv_heads": 64}, "q_heads: expected a multiple of kv_heads = 64, got 32"),
        ({"head_dim": 0}, "head_dim: expected 32, 64, 128 or 256, got 0"),
        ({"head_dim": 96}, "head_dim: expected 32, 64, 128 or 256, got 96"),
        ({"head_dim": 512}, "head_dim: expected 32, 64, 128 or 256, got 512"),
        ({"max_length": -1}, "max_length: expected at least 0, got -1"),
        ({"batch": 2**28}, r"batch: expected fewer than 2\^31 CTAs, got 2147483648"),
    ],
)
def test_impossible_problems(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_a_device_without_multiprocessors() -> None:
    none = _attention.DeviceInfo(
        sm_count=0, device_arch=90, image_arch=90, smem_per_sm=228 * KB, smem_per_block=227 * KB
    )
    with pytest.raises(ValueError, match="sm_count: expected at least 1, got 0"):
        plan(none)


def test_a_device_without_enough_shared_memory() -> None:
    small = _attention.DeviceInfo(
        sm_count=40, device_arch=75, image_arch=80, smem_per_sm=64 * KB, smem_per_block=64 * KB
    )
    with pytest.raises(RuntimeError, match=r"needs \d+ bytes of shared memory per block"):
        plan(small)
