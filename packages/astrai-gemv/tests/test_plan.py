# SPDX-License-Identifier: Apache-2.0
"""Launch plans are pure functions: tested for GPUs that are not here."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_gemv import _gemv

KB = 1024
H200 = _gemv.DeviceInfo(
    sm_count=132, device_arch=90, image_arch=90, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
# compute_80 PTX compiled by the driver of the same GPU.
H200_PTX80 = _gemv.DeviceInfo(
    sm_count=132, device_arch=90, image_arch=80, smem_per_sm=228 * KB, smem_per_block=227 * KB
)
L20 = _gemv.DeviceInfo(
    sm_count=92, device_arch=89, image_arch=89, smem_per_sm=100 * KB, smem_per_block=99 * KB
)
RTX_5090 = _gemv.DeviceInfo(
    sm_count=170, device_arch=120, image_arch=120, smem_per_sm=100 * KB, smem_per_block=99 * KB
)
DEVICES = {"h200": H200, "h200-ptx80": H200_PTX80, "l20": L20, "rtx5090": RTX_5090}


def plan(device: Any = H200, **changes: Any) -> dict[str, Any]:
    problem = {
        "m": 1,
        "n": 4096,
        "k": 4096,
        "row_stride": changes.get("k", 4096),
        "weight_address": 0,
        "x_address": 0,
        "swiglu": False,
        "static_weights": False,
    }
    return _gemv.plan_gemv(**{**problem, **changes}, device=device)


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({}, "aligned"),
        ({"swiglu": True}, "swiglu"),
        ({"k": 4095}, "unaligned"),
        ({"k": 4092}, "unaligned"),
        ({"weight_address": 2}, "unaligned"),
        ({"x_address": 8}, "unaligned"),
        ({"row_stride": 4100}, "unaligned"),
        ({"row_stride": 4104}, "aligned"),
        ({"n": 1, "row_stride": 4100}, "aligned"),
    ],
)
def test_row_source(changes: dict[str, Any], source: str) -> None:
    assert plan(**changes)["source"] == source


@pytest.mark.parametrize(
    ("m", "k", "held"),
    [(1, 8, 1), (4, 4096, 1), (1, 4104, 2), (4, 8192, 2), (1, 8200, 0), (5, 4096, 1), (8, 4104, 0)],
)
@pytest.mark.parametrize("swiglu", [False, True])
def test_x_stays_in_registers(m: int, k: int, held: int, swiglu: bool) -> None:
    """Two windows of up to 4 tokens take as many registers as one of 8."""
    found = plan(n=8192, k=k, m=m, swiglu=swiglu)
    assert found["segments"] == (2 if m <= 4 else 1)
    assert found["resident"] is (held > 0)
    assert found["held"] == max(held, 1)


@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize(("k", "resident"), [(4095, True), (4097, False)])
def test_unaligned_rows_have_one_segment(m: int, k: int, resident: bool) -> None:
    found = plan(n=8192, k=k, m=m)
    assert (found["segments"], found["held"]) == (1, 1)
    assert found["resident"] is resident


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, 1),
        ({"k": 4104}, 2),
        ({"k": 4104, "m": 8, "static_weights": True}, 2),
        ({"k": 4095}, 1),
        ({"k": 5001}, 1),
        ({"n": 4224, "k": 8192}, 2),
        ({"n": 4225, "k": 8192}, 1),
        ({"k": 8200}, 1),
        ({"n": 256, "k": 4104}, 8),
        ({"n": 257, "k": 4104}, 2),
        ({"n": 1, "k": 32768}, 8),
        ({"n": 1, "k": 32776}, 1),
        ({"n": 2112, "k": 8192, "swiglu": True}, 2),
        ({"n": 2113, "k": 8192, "swiglu": True}, 1),
        ({"n": 2048, "k": 8192, "device": H200_PTX80}, 1),
        ({"n": 2048, "k": 8192, "device": L20}, 1),
    ],
)
def test_a_cluster_shares_a_long_k_of_few_rows(changes: dict[str, Any], parts: int) -> None:
    found = plan(**changes)
    assert found["parts"] == parts
    if parts > 1:
        assert found["resident"]
        assert found["grid"] == parts * min(132 // parts, changes.get("n", 4096))


@pytest.mark.parametrize(
    ("k", "window"),
    [(8, 1), (1024, 1), (1025, 2), (4096, 4), (5120, 3), (8192, 4), (9217, 4), (14336, 4)],
)
@pytest.mark.parametrize("m", [1, 8])
def test_windows_of_x_are_of_one_size(m: int, k: int, window: int) -> None:
    """For any M the same: each window's products are added by themselves."""
    assert plan(n=8192, k=k, m=m)["window"] == window


@pytest.mark.parametrize(
    ("changes", "ctas_per_sm"),
    [
        ({}, 2),
        ({"m": 8}, 2),
        ({"static_weights": False}, 1),
        ({"swiglu": False}, 1),
        ({"n": 2 * 16 * 132 - 1}, 1),
        ({"n": 11008, "k": 4096}, 1),
        ({"swiglu": False, "n": 2048, "k": 8192}, 2),
        ({"swiglu": False, "n": 2048, "k": 8192, "m": 5}, 1),
        ({"swiglu": False, "n": 1024, "k": 8192}, 1),
        ({"swiglu": False, "n": 62500}, 2),
        ({"swiglu": False, "n": 62499}, 1),
        ({"device": H200_PTX80}, 1),
        ({"device": L20}, 1),
        # One CTA fits on an SM.
        ({"n": 16384, "device": RTX_5090}, 1),
    ],
)
def test_in_a_chain_some_are_dealt_out(changes: dict[str, Any], ctas_per_sm: int) -> None:
    chain = {"n": 8192, "k": 2048, "swiglu": True, "static_weights": True}
    found = plan(**(chain | changes))
    assert found["grid"] == ctas_per_sm * changes.get("device", H200).sm_count


@given(
    m=st.integers(1, 8), n=st.integers(1, 300_000), k=st.integers(4097, 2**27), swiglu=st.booleans()
)
def test_the_first_window_fills_the_ring(m: int, n: int, k: int, swiglu: bool) -> None:
    """The ring is filled before griddepcontrol.wait: x of a second window must not be in it."""
    slots_of_a_chunk, ring = 2, 6
    found = plan(m=m, n=n, k=k, swiglu=swiglu)
    assert found["resident"] or slots_of_a_chunk * int(found["window"]) >= ring


@given(
    n=st.integers(1, 300_000),
    k=st.integers(1, 70_000),
    swiglu=st.booleans(),
    static_weights=st.booleans(),
    name=st.sampled_from(sorted(DEVICES)),
)
def test_what_is_added_to_what_does_not_depend_on_m(
    n: int, k: int, swiglu: bool, static_weights: bool, name: str
) -> None:
    plans = [
        plan(DEVICES[name], m=m, n=n, k=k, swiglu=swiglu, static_weights=static_weights)
        for m in range(1, 9)
    ]
    order = ("source", "parts", "window")
    assert len({tuple(found[key] for key in order) for found in plans}) == 1
    for found in plans:
        chunks_of_a_warp = ceil(ceil(k / found["parts"]) / 1024)
        assert found["resident"] is (chunks_of_a_warp <= found["held"] * found["window"])
        if found["held"] != 1:
            assert found["held"] == found["segments"] == 2
            assert found["parts"] == 1
            assert found["resident"]


def test_dependent_launch_follows_the_image_not_the_gpu() -> None:
    # compute_80 code has no griddepcontrol.wait: launched early, it would read too early.
    assert plan(H200)["programmatic"] is True
    assert plan(H200_PTX80)["programmatic"] is False
    assert plan(L20)["programmatic"] is False
    norm = {"hidden": 4096, "aligned": True}
    assert _gemv.plan_add_rms_norm(**norm, device=H200)["programmatic"] is True
    assert _gemv.plan_add_rms_norm(**norm, device=H200_PTX80)["programmatic"] is False


@given(
    m=st.integers(1, 8),
    n=st.integers(1, 300_000),
    k=st.integers(1, 70_000),
    pad=st.integers(0, 9),
    weight_address=st.integers(0, 7).map(lambda e: 2 * e),
    x_address=st.integers(0, 7).map(lambda e: 2 * e),
    name=st.sampled_from(sorted(DEVICES)),
)
def test_any_problem_fits_any_device(
    m: int, n: int, k: int, pad: int, weight_address: int, x_address: int, name: str
) -> None:
    device = DEVICES[name]
    found = plan(
        device,
        m=m,
        n=n,
        k=k,
        row_stride=k + pad,
        weight_address=weight_address,
        x_address=x_address,
    )
    parts = found["parts"]
    assert 1 <= found["grid"] // parts <= min(n, max(device.sm_count, 8))
    assert found["grid"] % parts == 0
    if found["source"] == "unaligned":
        assert found["grid"] % 8 == 0 or found["grid"] == n
    ctas = 2 if name == "h200" else 1
    assert ctas * (found["smem_bytes"] + KB) <= device.smem_per_sm
    if found["source"] == "aligned":
        assert k % 8 == 0 and weight_address % 16 == 0 and x_address % 16 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": 0}, "m: expected 1..8, got 0"),
        ({"m": 9}, "m: expected 1..8, got 9"),
        ({"n": 0}, "n: expected at least 1, got 0"),
        ({"k": 0}, "k: expected at least 1, got 0"),
        ({"row_stride": 4000}, "row_stride: expected at least k = 4096, got 4000"),
    ],
)
def test_impossible_problems(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_a_device_without_enough_shared_memory() -> None:
    small = _gemv.DeviceInfo(
        sm_count=40, device_arch=75, image_arch=80, smem_per_sm=64 * KB, smem_per_block=64 * KB
    )
    with pytest.raises(RuntimeError, match=r"needs \d+ bytes of shared memory per block"):
        plan(small)


@given(hidden=st.integers(1, 100_000), aligned=st.booleans())
def test_norm_plan(hidden: int, aligned: bool) -> None:
    found = _gemv.plan_add_rms_norm(hidden=hidden, aligned=aligned, device=H200)
    assert found["threads"] % 32 == 0 and 32 <= found["threads"] <= 1024
    assert hidden % found["vector"] == 0
    assert found["vector"] == (8 if aligned and hidden % 8 == 0 else 1)
