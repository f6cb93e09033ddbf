# SPDX-License-Identifier: Apache-2.0
"""How prefill behaves on a GPU: streams, graphs, dependent launches, gradients, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from prefill_operands import Paged, indices, paged, randn
from torch import Tensor

from astrai_attention import _attention, attn_paged_prefill, attn_prefill, rotary_emb

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]


def dense_case(**shape: int) -> dict[str, Any]:
    size = {"batch": 2, "length": 300, "head_dim": 128, **shape}
    q, k, v = (randn(size["batch"], size["length"], heads, size["head_dim"]) for heads in (8, 2, 2))
    return {"q": q, "k": k, "v": v}


def masked_case() -> dict[str, Any]:
    return {**dense_case(), "mask": torch.rand(2, 300, device="cuda") < 0.5}


def paged_case(**changes: Any) -> Paged:
    return paged([70, 300, 1], [170, 300, 511], q_heads=8, head_dim=128, **changes)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "dense": (partial(attn_prefill, is_causal=True, return_lse=True), dense_case),
    "masked": (partial(attn_prefill, return_lse=True), masked_case),
    "paged": (partial(attn_paged_prefill, return_lse=True), lambda: paged_case().operands),
}
NAMES = pytest.mark.parametrize("name", CASES)


def equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@NAMES
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_two_runs_are_bitwise_equal(name: str, head_dim: int) -> None:
    run, _ = CASES[name]
    operands = {
        "dense": lambda: dense_case(length=999, head_dim=head_dim),
        "masked": lambda: {
            **dense_case(head_dim=head_dim), "mask": torch.rand(2, 300, 300, device="cuda") < 0.5
        },
        "paged": lambda: paged([70, 800], [900, 800], head_dim=head_dim, page_size=1).operands,
    }[name]()  # fmt: skip
    first = run(**operands)
    for _ in range(20):
        assert equal(run(**operands), first)


@NAMES
def test_the_current_stream_is_used(name: str) -> None:
    run, make = CASES[name]
    operands = make()
    expected = run(**operands)
    for late in (key for key, value in operands.items() if isinstance(value, Tensor)):
        arguments = dict(operands)
        final, arguments[late] = operands[late], torch.zeros_like(operands[late])
        if late in ("k_pool", "v_pool"):
            arguments[late] = torch.zeros_like(final).as_strided(final.shape, final.stride())
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # Not on the side stream, the op would run before this is over.
            torch.cuda._sleep(20_000_000)
            arguments[late].copy_(final)
            found = run(**arguments)
        stream.synchronize()
        assert equal(found, expected), late


@NAMES
def test_graph_replay_with_changed_inputs(name: str) -> None:
    run, make = CASES[name]
    operands = make()
    run(**operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(**operands)
    for _ in range(3):
        for key in ("q", "mask"):
            if key in operands:
                fresh = torch.randn(operands[key].shape, device="cuda")
                operands[key].copy_(fresh if key == "q" else fresh > 0)
        graph.replay()
        assert equal(found, run(**operands))


def test_graph_replay_with_other_lengths() -> None:
    """A ragged batch whose lengths and pages change between replays, within the captured maps."""
    first, second = paged_case(), paged([64, 257, 50], [64, 400, 300], q_heads=8, head_dim=128)
    pages = max(first.k_pool.shape[0], second.k_pool.shape[0])
    wide = max(first.page_table.shape[1], second.page_table.shape[1])
    assert first.q.shape == second.q.shape

    def padded(case: Paged) -> dict[str, Tensor]:
        pools = {}
        for name in ("k_pool", "v_pool"):
            pool = getattr(case, name)
            pools[name] = torch.cat((pool, pool.new_zeros(pages - len(pool), *pool.shape[1:])))
        table = torch.full((3, wide), 0, dtype=torch.int32, device="cuda")
        table[:, : case.page_table.shape[1]] = case.page_table
        maps = {}
        # A tile twice is the same work twice.
        for name in ("q_tile_to_batch", "q_tile_to_index"):
            tiles = getattr(case, name).tolist()
            maps[name] = indices(tiles + tiles[:1] * (9 - len(tiles)))
        return {**case.operands, **pools, **maps, "page_table": table}

    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in padded(first).items()}
    attn_paged_prefill(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attn_paged_prefill(**static)
    for case in (second, first):
        for key, value in padded(case).items():
            if isinstance(value, Tensor):
                static[key].copy_(value)
        graph.replay()
        assert torch.equal(out, attn_paged_prefill(**case.operands))


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_chain_of_dependent_launches(in_graph: bool) -> None:
    """Rotary and attention in turn: each starts while the one before still runs, and reads it."""
    x = randn(1, 1024, 8, 128)
    angle = torch.rand(1024, 64, device="cuda") * 6.4
    cos, sin = angle.cos(), angle.sin()

    def chain(wait: Callable[[], object]) -> Tensor:
        y = x
        for _ in range(8):
            y = rotary_emb(y, cos, sin, interleaved=False)
            wait()
            y = attn_prefill(y, y, y, is_causal=True)
            wait()
        return y

    expected = chain(torch.cuda.synchronize)
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(lambda: None)
        graph.replay()
    else:
        found = chain(lambda: None)
    assert torch.equal(found, expected)


def test_mixed_devices_are_refused() -> None:
    operands = dense_case()
    for name in ("k", "v"):
        with pytest.raises(ValueError, match=f"{name}: expected a CUDA tensor, got one on the CPU"):
            attn_prefill(**{**operands, name: operands[name].cpu()})
    case = paged_case().operands
    with pytest.raises(ValueError, match="kv_indptr: expected a CUDA tensor"):
        attn_paged_prefill(**{**case, "kv_indptr": case["kv_indptr"].cpu()})


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_gradients_are_not_lost(name: str) -> None:
    operands = dense_case()
    operands["out"] = torch.empty_like(operands["q"])
    operands[name].requires_grad_()
    message = f"{name}: requires grad, and attn_prefill has no backward"
    with torch.enable_grad(), pytest.raises(RuntimeError, match=message):
        attn_prefill(**operands)
    with torch.no_grad():
        assert not attn_prefill(**{**operands, "out": None}).requires_grad


def test_opcheck() -> None:
    operands = dense_case(length=9)
    q, k, v = operands.values()
    ops = torch.ops.astrai_attention
    mask = torch.rand(2, 9, device="cuda") < 0.5
    torch.library.opcheck(ops.attn_prefill.default, (q, k, v, mask, True, None))
    torch.library.opcheck(ops.attn_prefill.default, (q[:, :, :4], k, v, None, False, 0.5))
    for lse in (None, torch.empty(2, 8, 9, device="cuda")):
        arguments = (q, k, v, None, True, None, torch.empty_like(q), lse)
        torch.library.opcheck(ops.attn_prefill_out.default, arguments)
    arguments = (*paged([3, 70], [9, 70]).operands.values(), True, None)
    torch.library.opcheck(ops.attn_paged_prefill.default, arguments)
    out = torch.empty_like(arguments[0])
    torch.library.opcheck(ops.attn_paged_prefill_out.default, (*arguments, out, None))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@NAMES
@pytest.mark.parametrize("apart", [False, True])
def test_torch_compile_fullgraph(name: str, apart: bool) -> None:
    run, make = CASES[name]
    operands = make()

    def layer(operands: dict[str, Any], out: Tensor | None) -> tuple[Tensor, Tensor]:
        y, lse = run(**operands, out=out)
        return y * 2, lse + 1

    out = torch.empty_like(operands["q"]) if apart else None
    expected = layer(operands, None)
    assert equal(torch.compile(layer, fullgraph=True)(operands, out), expected)
    if out is not None:
        assert torch.equal(out * 2, expected[0])


def test_the_plan_is_that_of_the_image() -> None:
    info = _attention.device_info(0)
    found = _attention.plan_prefill(
        batch=1, q_len=64, kv_len=64, q_tiles=0, q_heads=8, kv_heads=8, head_dim=128,
        masked=False, device=info,
    )  # fmt: skip
    assert found["programmatic"] is (info.image_arch >= 90)
