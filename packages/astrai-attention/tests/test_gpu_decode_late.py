# SPDX-License-Identifier: Apache-2.0
"""What decode reads of the kernel before, which lets it start early and writes late."""

from __future__ import annotations

import pytest
import torch
from decode_operands import BF16, Paged, paged
from operands import randn

from astrai_attention import attn_paged_decode, attn_prefill

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

# Room for tokens: on sm_90 a cluster of CTAs up to 3072, else splits.
CAPACITIES = pytest.mark.parametrize("capacity", [2048, 16_384])


def after_a_late_write(cache: Paged, late: str, *, static_cache: bool) -> list[bool]:
    """Whether calls are right whose preceding kernel lets them start early and writes `late` late.

    That kernel is a prefill whose few CTAs read 20,000 tokens each before they store the zeros that
    `late` consists of. Reading it before griddepcontrol.wait gives NaN, or the wrong page.
    """
    arguments = {"q": randn(2, 1, 8, 128), **cache.arguments}
    operand = arguments[late].zero_()
    expected = attn_paged_decode(**arguments)
    arguments[late] = torch.empty_like(operand)
    written = arguments[late].view(BF16).view(1, -1, 1, 128)
    zeros = torch.zeros(1, 20_000, 1, 128, device="cuda", dtype=BF16)
    results = []
    for _ in range(10):
        arguments[late].fill_(torch.nan if operand.is_floating_point() else 1)
        attn_prefill(torch.zeros_like(written), zeros, zeros, out=written)
        results.append(attn_paged_decode(**arguments, static_cache=static_cache))
    return [torch.equal(result, expected) for result in results]


@pytest.mark.parametrize("static_cache", [False, True])
@pytest.mark.parametrize("late", ["q", "new_k", "new_v"])
@CAPACITIES
def test_operands_written_by_the_preceding_kernel(
    late: str, capacity: int, static_cache: bool
) -> None:
    cache = paged([700, 90], page_size=16, capacity=capacity, head_dim=128, append=True)
    assert all(after_a_late_write(cache, late, static_cache=static_cache))


@CAPACITIES
def test_a_page_table_written_by_the_preceding_kernel(capacity: int) -> None:
    cache = paged([700, 90], page_size=16, capacity=capacity, head_dim=128)
    cache.k_pool.normal_()
    cache.v_pool.normal_()
    assert all(after_a_late_write(cache, "page_table", static_cache=False))


@pytest.mark.parametrize("static_cache", [False, True])
def test_only_a_static_cache_is_read_early(static_cache: bool) -> None:
    """A call that is told that the pool of K is there reads NaN, if the host is fast enough."""
    cache = paged([700, 90], page_size=16, capacity=2048, head_dim=128, append=True)
    right = after_a_late_write(cache, "k_pool", static_cache=static_cache)
    assert all(right) is not static_cache
