# SPDX-License-Identifier: Apache-2.0
"""How decode behaves on a GPU: streams, graphs, dependent launches, gradients, torch.compile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from decode_operands import BF16, INT32, Paged, check_values, paged, same_bits
from operands import randn
from torch import Tensor

from astrai_attention import attn_decode, attn_paged_decode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

# Room for tokens: on sm_90 a cluster of CTAs up to 3072, else splits.
CAPACITIES = pytest.mark.parametrize("capacity", [2048, 16_384])
APPEND = pytest.mark.parametrize("append", [False, True], ids=["", "append"])

Op = Callable[..., Tensor]


def op_of(kind: str, capacity: int) -> tuple[Op, dict[str, Tensor]]:
    """The op of a query and a scale over two sequences, and the tensors that it reads besides."""
    length = capacity * 3 // 4
    if kind == "contiguous":
        k, v = randn(2, length, 2, 128), randn(2, length, 2, 128)
        return lambda q, **scale: attn_decode(q, k, v, **scale), {"k": k, "v": v}
    cache = paged(
        [length, length // 2],
        page_size=16,
        capacity=capacity,
        head_dim=128,
        append=kind in ("append", "static"),
    )
    early = kind == "static"
    names = ("k_pool", "v_pool", "page_table", "seq_lens")
    reads = {name: getattr(cache, name) for name in names} | cache.new
    arguments = cache.arguments | {"static_cache": early}
    return lambda q, **scale: attn_paged_decode(q, **arguments, **scale), reads


KINDS = pytest.mark.parametrize("kind", ["contiguous", "paged", "append"])
# Reads all but the newest token early: nobody writes the others meanwhile.
EVERY_KIND = pytest.mark.parametrize("kind", ["contiguous", "paged", "append", "static"])


@EVERY_KIND
@CAPACITIES
def test_two_runs_are_bitwise_equal(kind: str, capacity: int) -> None:
    (op, _), q = op_of(kind, capacity), randn(2, 1, 16, 128)
    first = op(q)
    assert first.isfinite().all()
    for _ in range(20):
        assert torch.equal(op(q), first)


@KINDS
@CAPACITIES
def test_the_current_stream_is_used(kind: str, capacity: int) -> None:
    (op, reads), q = op_of(kind, capacity), randn(2, 1, 16, 128)
    expected = op(q)
    stream = torch.cuda.Stream()
    for tensor in (q, *reads.values()):
        final = tensor.clone()
        tensor.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # Not on the side stream, the op would run before this is over.
            torch.cuda._sleep(20_000_000)
            tensor.copy_(final)
            out = op(q)
        stream.synchronize()
        assert torch.equal(out, expected)


@APPEND
@CAPACITIES
def test_a_graph_serves_any_lengths(append: bool, capacity: int) -> None:
    """Captured with short sequences; replayed with longer, shorter and empty ones."""
    q = randn(3, 1, 8, 128)
    caches = [
        paged(
            lengths,
            page_size=16,
            capacity=capacity,
            head_dim=128,
            append=append,
            reserved=True,
        )
        for lengths in (
            [1, 7, 30],
            [2000, 0, 1],
            [17, capacity, 300],
            [0, 0, 0],
            [capacity, capacity, capacity],
            [1, 2, 3],
        )
    ]
    # Every cache has as many pages: they take turns in the memory of one.
    names = ("k_pool", "v_pool", "page_table", "seq_lens")
    held = replace(
        caches[0],
        **{name: getattr(caches[0], name).clone() for name in names},
        new={name: tensor.clone() for name, tensor in caches[0].new.items()},
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attn_paged_decode(q, **held.arguments, return_lse=True)
    for cache in (*caches, caches[0]):
        for name in names:
            getattr(held, name).copy_(getattr(cache, name))
        for name, tensor in held.new.items():
            tensor.copy_(cache.new[name])
        q.copy_(randn(3, 1, 8, 128))
        eager = attn_paged_decode(q, **(cache.arguments | _pools_of(cache)), return_lse=True)
        graph.replay()
        for found, expected in zip(result, eager, strict=True):
            assert torch.equal(found, expected)
        check_values(result, q, cache.k, cache.v, cache.keep)
        for pool, filled in zip((held.k_pool, held.v_pool), cache.filled, strict=True):
            assert same_bits(pool, filled)


def test_a_graph_for_long_sequences_serves_short_ones() -> None:
    """Captured for 131,072 tokens."""
    cache = paged([16_384, 512], page_size=16, capacity=131_072)
    q, lengths = randn(2, 1, 8, 64), torch.ones_like(cache.seq_lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attn_paged_decode(q, **cache.arguments | {"seq_lens": lengths}, return_lse=True)
    for now in ([16_384, 512], [512, 16], [1, 0], [2000, 511]):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        keep = torch.arange(16_384, device="cuda") < lengths[:, None]
        check_values(result, q, cache.k, cache.v, keep)


def _pools_of(cache: Paged) -> dict[str, Tensor]:
    """Copies: an eager call appends too."""
    return {"k_pool": cache.k_pool.clone(), "v_pool": cache.v_pool.clone()}


@CAPACITIES
def test_a_graph_that_counts_for_itself(capacity: int) -> None:
    """Tokens come one by one: the graph appends them and adds 1 to the lengths."""
    steps, start = 40, [5, 1000]
    cache = paged(start, page_size=16, capacity=capacity, reserved=True)
    lengths = cache.seq_lens
    new_k, new_v, q = randn(2, 1, 2, 64), randn(2, 1, 2, 64), randn(2, 1, 8, 64)
    k, v = torch.zeros(2, 1040, 2, 64), torch.zeros(2, 1040, 2, 64)
    k[:, :1000], v[:, :1000] = cache.k.cpu().float(), cache.v.cpu().float()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lengths += 1
        result = attn_paged_decode(q, **cache.arguments, new_k=new_k, new_v=new_v, return_lse=True)
    for step in range(steps):
        for tensor in (q, new_k, new_v):
            tensor.copy_(randn(*tensor.shape))
        graph.replay()
        for b, first in enumerate(start):
            k[b, first + step], v[b, first + step] = new_k[b, 0].cpu(), new_v[b, 0].cpu()
        keep = torch.arange(1040) < torch.tensor(start)[:, None] + step + 1
        check_values(result, q, *(x.to(BF16).cuda() for x in (k, v)), keep.cuda())
    assert lengths.tolist() == [45, 1040]


@EVERY_KIND
@CAPACITIES
def test_graph_replay_with_changed_queries(kind: str, capacity: int) -> None:
    (op, _), q = op_of(kind, capacity), randn(2, 1, 16, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(q)
    for _ in range(3):
        q.copy_(randn(2, 1, 16, 128))
        graph.replay()
        assert torch.equal(out, op(q))


def test_first_call_may_be_a_capture() -> None:
    """Loading the module and raising the shared-memory limit are legal in a capture."""
    code = (
        "import torch; from astrai_attention import attn_decode\n"
        "x = torch.ones(1, 5000, 4, 128, device='cuda', dtype=torch.bfloat16)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): y = attn_decode(x[:, :1], x, x)\n"
        "graph.replay(); print(y.float().unique().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[1.0]\n"


@pytest.mark.parametrize("in_graph", [False, True])
@EVERY_KIND
@CAPACITIES
def test_a_chain_of_dependent_launches(kind: str, capacity: int, in_graph: bool) -> None:
    """Each call starts while the one before still runs, and its queries are what that one wrote.

    Their workspaces share memory: it is free again once the call has returned. The scale makes up
    for averages being small, so that a call depends on the one before.
    """
    (op, _), q = op_of(kind, capacity), randn(2, 1, 16, 128)
    expected = q
    for _ in range(16):
        expected = op(expected, scale=2.0)
        torch.cuda.synchronize()

    def chain() -> Tensor:
        y = q
        for _ in range(16):
            y = op(y, scale=2.0)
        return y

    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain()
        graph.replay()
    else:
        y = chain()
    assert torch.equal(y, expected)


@CAPACITIES
def test_operands_may_be_on_any_device(capacity: int) -> None:
    """Whichever is current; on GPUs of one kind with the same result."""
    q, k = randn(2, 1, 8, 128), randn(2, capacity, 2, 128)
    cache = paged([700, 90], page_size=16, capacity=capacity, head_dim=128, append=True)
    expected = attn_decode(q, k, k), attn_paged_decode(q, **cache.arguments)
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        there = {
            name: x.to(device) if isinstance(x, Tensor) else x
            for name, x in cache.arguments.items()
        }
        moved = q.to(device), k.to(device)
        found = attn_decode(*moved, moved[1]), attn_paged_decode(moved[0], **there)
        for y, right in zip(found, expected, strict=True):
            assert y.device == moved[0].device
            assert torch.equal(y.cpu(), right.cpu()), index
        if index > 0:
            with pytest.raises(ValueError, match=f"k: expected .*cuda:0.*cuda:{index}"):
                attn_decode(q, moved[1], moved[1])
    assert torch.cuda.current_device() == 0


def test_mixed_devices_are_refused() -> None:
    q, k = randn(1, 1, 4, 64), randn(1, 9, 2, 64)
    mask = torch.ones(1, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="v: expected a CUDA tensor, got one on the CPU"):
        attn_decode(q, k, k.cpu())
    with pytest.raises(ValueError, match="mask: expected a CUDA tensor"):
        attn_decode(q, k, k, mask)
    with pytest.raises(ValueError, match="out: expected a CUDA tensor"):
        attn_decode(q, k, k, out=q.cpu())
    cache = paged([9], page_size=4, capacity=16, append=True)
    for name in ("page_table", "seq_lens", "new_k", "new_v"):
        changed = {name: cache.arguments[name].cpu()}
        with pytest.raises(ValueError, match=f"{name}: expected a CUDA tensor"):
            attn_paged_decode(q, **cache.arguments | changed)


def test_autograd_sees_what_was_written() -> None:
    q, k, v = randn(1, 1, 4, 64), randn(1, 9, 2, 64), randn(1, 9, 2, 64)
    out, leaf = randn(1, 1, 4, 64), randn(1, 1, 4, 64).requires_grad_()
    with torch.enable_grad():
        loss = (out * leaf).sum()
    version = out._version
    attn_decode(q, k, v, out=out)
    assert out._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    cache = paged([9], page_size=4, capacity=16, append=True)
    pools = (cache.k_pool, cache.v_pool)
    for new in (cache.new, {}):
        versions = [pool._version for pool in pools]
        cache.new = new
        attn_paged_decode(q, **cache.arguments)
        written = [pool._version > old for pool, old in zip(pools, versions, strict=True)]
        assert written == [bool(new)] * 2


def test_parameters_are_taken_without_grad() -> None:
    q, k = torch.nn.Parameter(randn(1, 1, 4, 64)), randn(1, 9, 2, 64)
    assert not attn_decode(q, k, k).requires_grad


def test_opcheck() -> None:
    ops, check = torch.ops.astrai_attention, torch.library.opcheck
    q, k, v = randn(2, 1, 4, 64), randn(2, 9, 2, 64), randn(2, 9, 2, 64)
    mask, out = torch.rand(2, 9, device="cuda") < 0.5, torch.empty_like(q)
    check(ops.attn_decode.default, (q, k, v, None, None))
    check(ops.attn_decode.default, (q, k, v, mask, 0.5))
    check(ops.attn_decode_out.default, (q, k, v, mask, None, out, None, None))
    lse = torch.empty(2, 4, 1, device="cuda")
    workspace = torch.empty(1 << 20, device="cuda", dtype=torch.uint8)
    check(ops.attn_decode_out.default, (q, k, v, mask, None, out, lse, workspace))
    for append in (False, True):
        cache = paged([9, 40], page_size=4, capacity=64, append=append)
        arguments = (q, cache.k_pool, cache.v_pool, cache.page_table, cache.seq_lens, 4)
        arguments += (*cache.new.values(), None)
        # NaN differs from itself.
        for pool in (cache.k_pool, cache.v_pool):
            pool.nan_to_num_(7)
        name = "attn_paged_decode_append" if append else "attn_paged_decode"
        check(getattr(ops, name).default, arguments)
        check(getattr(ops, f"{name}_out").default, (*arguments, out, None, None))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("with_out", [False, True])
def test_torch_compile_fullgraph(with_out: bool) -> None:
    def attention(fused: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = fused[:, -1:, :8], fused[:, :, 8:10], fused[:, :, 10:]
        result, lse = attn_decode(
            q * 2, k, v, scale=0.2, return_lse=True, out=out if with_out else None
        )
        return result + 1, lse * 2

    fused, out = randn(2, 300, 12, 64), randn(2, 1, 8, 64)
    again = out.clone()
    compiled = torch.compile(attention, fullgraph=True)
    for found, expected in zip(compiled(fused, out), attention(fused, again), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(out, again)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@APPEND
@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens", "heads"])
def test_torch_compile_fullgraph_paged(append: bool, heads_first: bool) -> None:
    cache = paged([300, 0, 17], page_size=16, capacity=512, append=append, heads_first=heads_first)

    def step(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        new = {name: tensor * 1 for name, tensor in cache.new.items()}
        for _ in range(2):
            q = q + attn_paged_decode(q, k_pool, v_pool, table, lengths, page_size=16, **new)
        return q

    q, others = randn(3, 1, 8, 64), (cache.page_table, cache.seq_lens)
    again = _pools_of(cache)
    expected = step(q, *again.values(), *others)
    found = torch.compile(step, fullgraph=True)(q, cache.k_pool, cache.v_pool, *others)
    assert torch.equal(found, expected)
    for pool, filled in zip((cache.k_pool, cache.v_pool), cache.filled, strict=True):
        assert same_bits(pool, filled)


def test_the_table_and_the_lengths_may_change_between_calls_of_a_trace() -> None:
    cache = paged([300, 0], page_size=16, capacity=512)
    call = torch.compile(attn_paged_decode, fullgraph=True, backend="eager")
    q = randn(2, 1, 4, 64)
    for lengths in ([300, 0], [20, 0]):
        cache.seq_lens.copy_(torch.tensor(lengths, dtype=INT32))
        assert torch.equal(call(q, **cache.arguments), attn_paged_decode(q, **cache.arguments))
