# SPDX-License-Identifier: Apache-2.0
"""Calls into memory of the caller's on a GPU: nothing is allocated, nothing else is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decode_operands
import prefill_operands
import pytest
import torch
from operands import randn
from torch import Tensor

from astrai_attention import (
    attn_decode,
    attn_paged_decode,
    attn_paged_prefill,
    attn_prefill,
    decode_workspace_size,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

SMALL = pytest.mark.sanitize
# On sm_90 decode shares 16,384 tokens among splits, 2048 in a cluster.
LENGTHS = {"decode": 2048, "paged decode": 2048, "long decode": 16_384, "long paged": 16_384}
OPS = [*LENGTHS, "prefill", "paged prefill"]
EVERY = pytest.mark.parametrize("kind", OPS)
DECODE = pytest.mark.parametrize("kind", LENGTHS)

Op = Callable[..., Any]


def case_of(kind: str) -> tuple[Op, dict[str, Any], tuple[int, ...]]:
    """An op, its operands, and the shape of lse."""
    if kind == "prefill":
        q, k, v = (randn(2, 70, heads, 128) for heads in (8, 2, 2))
        return attn_prefill, {"q": q, "k": k, "v": v, "is_causal": True}, (2, 8, 70)
    if kind == "paged prefill":
        case = prefill_operands.paged([70, 3], [170, 3], q_heads=8, head_dim=128)
        return attn_paged_prefill, case.operands, (8, 73)
    q, length = randn(2, 1, 8, 128), LENGTHS[kind]
    if "paged" not in kind:
        k, v = randn(2, length, 2, 128), randn(2, length, 2, 128)
        return attn_decode, {"q": q, "k": k, "v": v}, (2, 8, 1)
    cache = decode_operands.paged(
        [length * 3 // 4, 17], page_size=16, capacity=length, head_dim=128, append=True
    )
    return attn_paged_decode, {"q": q, **cache.arguments}, (2, 8, 1)


def size_of(kind: str) -> int:
    return decode_workspace_size(
        batch=2, q_heads=8, kv_heads=2, head_dim=128, max_length=LENGTHS[kind], device=0
    )


def buffers_of(kind: str, operands: dict[str, Any], lse: tuple[int, ...]) -> dict[str, Tensor]:
    """Poisoned, the workspace not a byte larger than it has to be."""
    given = {
        "out": torch.full_like(operands["q"], torch.nan),
        "lse": torch.full(lse, torch.nan, device="cuda"),
    }
    if kind in LENGTHS:
        given["workspace"] = torch.full((size_of(kind),), 0xFF, device="cuda", dtype=torch.uint8)
    return given


def equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@EVERY
def test_nothing_is_allocated(kind: str) -> None:
    run, operands, shape = case_of(kind)
    expected = run(**operands, return_lse=True)
    given = buffers_of(kind, operands, shape)

    def count() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = count()
    out, lse = run(**operands, **given)
    assert count() == before
    assert out is given["out"] and lse is given["lse"]
    assert equal((out, lse), expected)
    # The count counts.
    run(**operands)
    assert count() > before
    del given["lse"]
    before = count()
    out = run(**operands, **given)
    assert count() == before
    assert torch.equal(out, expected[0])


@SMALL
@pytest.mark.parametrize("capacity", [64, 4096])
def test_buffers_small(capacity: int) -> None:
    cache = decode_operands.paged([33, 1], page_size=16, capacity=capacity, append=True)
    q = randn(2, 1, 4, 64)
    expected = attn_paged_decode(q, **cache.arguments, return_lse=True)
    size = decode_workspace_size(
        batch=2, q_heads=4, kv_heads=2, head_dim=64, max_length=capacity, device=0
    )
    buffers = {
        "out": torch.empty_like(q),
        "lse": torch.empty(2, 4, 1, device="cuda"),
        "workspace": torch.empty(size, device="cuda", dtype=torch.uint8),
    }
    assert equal(attn_paged_decode(q, **cache.arguments, **buffers), expected)


@DECODE
def test_a_workspace_is_written_as_far_as_its_size_says(kind: str) -> None:
    run, operands, _ = case_of(kind)
    expected, size = run(**operands), size_of(kind)
    memory = torch.full((size + 4096,), 0x5A, device="cuda", dtype=torch.uint8)
    assert torch.equal(run(**operands, workspace=memory[2048 : size + 2048]), expected)
    assert (memory[:2048] == 0x5A).all() and (memory[size + 2048 :] == 0x5A).all()
    assert torch.equal(run(**operands, workspace=memory), expected)


@pytest.mark.parametrize("kind", ["long decode", "long paged"])
def test_a_workspace_that_is_too_small(kind: str) -> None:
    run, operands, _ = case_of(kind)
    size = size_of(kind)
    assert size > 0
    for bytes_ in (0, size - 1):
        memory = torch.empty(bytes_, device="cuda", dtype=torch.uint8)
        message = rf"workspace: expected at least {size} bytes \(see decode_.*\), got {bytes_}$"
        with pytest.raises(ValueError, match=message):
            run(**operands, workspace=memory)


@EVERY
def test_a_graph_of_calls_into_the_same_memory(kind: str) -> None:
    """Calls that follow one another use one workspace: each starts while the one before runs."""
    run, operands, shape = case_of(kind)
    queries = [randn(*operands["q"].shape) for _ in range(6)]
    expected = [run(**{**operands, "q": q}, return_lse=True) for q in queries]
    given = [buffers_of(kind, operands, shape) for _ in queries]
    shared = {k: v for k, v in given[0].items() if k == "workspace"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for q, own in zip(queries, given, strict=True):
            run(**{**operands, "q": q, **own, **shared})
    for _ in range(3):
        graph.replay()
    for own, wanted in zip(given, expected, strict=True):
        assert equal((own["out"], own["lse"]), wanted)


@EVERY
def test_autograd_sees_what_was_written(kind: str) -> None:
    run, operands, shape = case_of(kind)
    given = buffers_of(kind, operands, shape)
    versions = given["out"]._version, given["lse"]._version
    run(**operands, **given)
    assert given["out"]._version > versions[0] and given["lse"]._version > versions[1]


@EVERY
def test_mixed_devices_are_refused(kind: str) -> None:
    run, operands, shape = case_of(kind)
    for name, buffer in buffers_of(kind, operands, shape).items():
        with pytest.raises(ValueError, match=f"{name}: expected a CUDA tensor, got one on the CPU"):
            run(**operands, **{name: buffer.cpu()})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "names"),
    [(kind, names) for kind in OPS for names in (("lse",), ("out", "lse"))]
    + [
        (kind, names) for kind in LENGTHS for names in (("workspace",), ("out", "lse", "workspace"))
    ],
)
def test_torch_compile_fullgraph(kind: str, names: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    run, operands, shape = case_of(kind)
    expected = run(**operands, return_lse=True)
    given = buffers_of(kind, operands, shape)
    given = {name: given[name] for name in names}

    def layer(operands: dict[str, Any], given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out, lse = run(**operands, **given, return_lse=True)
        return out * 2, lse + 1

    out, lse = torch.compile(layer, fullgraph=True)(operands, given)
    assert torch.equal(out, expected[0] * 2) and torch.equal(lse, expected[1] + 1)
    for name, wanted in zip(("out", "lse"), expected, strict=True):
        if name in given:
            assert torch.equal(given[name], wanted)
