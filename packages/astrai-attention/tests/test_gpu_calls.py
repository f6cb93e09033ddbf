# SPDX-License-Identifier: Apache-2.0
"""How the ops behave on a GPU: streams, graphs, dependent launches, gradients, torch.compile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operands import angles, randn
from torch import Tensor

from astrai_attention import _attention, _family, rotary_emb
from kernelkit.wheels import image_arch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

BF16 = torch.bfloat16

OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "halves": lambda x, c, s: rotary_emb(x, c, s, interleaved=False),
    "interleaved": lambda x, c, s: rotary_emb(x, c, s, interleaved=True),
    "in_place": lambda x, c, s: rotary_emb(y := x.clone(), c, s, interleaved=True, out=y),
}


@pytest.mark.parametrize("name", OPS)
def test_two_runs_are_bitwise_equal(name: str) -> None:
    x, (cos, sin) = randn(2, 999, 9, 128), angles(999, 64)
    first = OPS[name](x, cos, sin)
    for _ in range(20):
        assert torch.equal(OPS[name](x, cos, sin), first)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("late", ["x", "cos", "sin"])
def test_the_current_stream_is_used(name: str, late: str) -> None:
    x, (cos, sin) = randn(2, 9, 4, 128), angles(9, 64)
    arguments: dict[str, Tensor] = {"x": x, "cos": cos, "sin": sin}
    expected = OPS[name](*arguments.values())
    final, arguments[late] = arguments[late], torch.zeros_like(arguments[late])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Not on the side stream, the op would run before this is over.
        torch.cuda._sleep(20_000_000)
        arguments[late].copy_(final)
        out = OPS[name](*arguments.values())
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", OPS)
def test_graph_replay_with_changed_inputs(name: str) -> None:
    x, (cos, sin) = randn(4, 1, 32, 128), angles(4, 1, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS[name](x, cos, sin)
    for _ in range(3):
        x.copy_(randn(4, 1, 32, 128))
        for old, new in zip((cos, sin), angles(4, 1, 64), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(y, OPS[name](x, cos, sin))


def test_first_call_may_be_a_capture() -> None:
    """Loading the module is legal in a capture."""
    code = (
        "import torch; from astrai_attention import rotary_emb\n"
        "x = torch.ones(1, 1, 32, device='cuda', dtype=torch.bfloat16)\n"
        "t = torch.ones(1, 16, device='cuda')\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): y = rotary_emb(x, t, t, interleaved=False)\n"
        "graph.replay(); print(y.float().unique().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[0.0, 2.0]\n"


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_chain_of_dependent_launches(in_graph: bool) -> None:
    """Each call starts while the one before still runs, and reads and overwrites what it wrote."""
    x, (cos, sin) = randn(1, 4096, 32, 128), angles(4096, 64)
    y = torch.empty_like(x)

    def chain() -> None:
        y.copy_(x)
        for index in range(16):
            rotary_emb(y, cos, sin, interleaved=index % 2 == 0, out=y)

    expected = x
    for index in range(16):
        expected = rotary_emb(expected, cos, sin, interleaved=index % 2 == 0)
        torch.cuda.synchronize()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        graph.replay()
    else:
        chain()
    assert torch.equal(y, expected)


def test_angles_written_by_the_preceding_kernel() -> None:
    """The preceding kernel lets this one start early and writes its cosines late.

    `first` is turned by nothing, so that its last elements, the cosines as pairs of bf16, come out
    as they are, at the end of the launch. Reading them before griddepcontrol.wait gives NaN.
    """
    x, (cos, sin) = randn(8, 1, 32, 128), angles(8, 1, 64)
    cos = cos.to(BF16).float()
    first = randn(8192, 32, 128)
    first.view(-1)[-2 * cos.numel() :] = cos.view(-1).view(BF16)
    one, zero = torch.ones(8192, 64, device="cuda"), torch.zeros(8192, 64, device="cuda")
    written = torch.empty_like(first)
    table = written.view(-1)[-2 * cos.numel() :].view(torch.float32).view_as(cos)
    expected = rotary_emb(x, cos, sin, interleaved=True)
    torch.cuda.synchronize()
    results = []
    for _ in range(30):
        written.fill_(torch.nan)
        rotary_emb(first, one, zero, interleaved=True, out=written)
        results.append(rotary_emb(x, table, sin, interleaved=True))
    assert torch.equal(table, cos)
    assert all(torch.equal(result, expected) for result in results)


def test_out_may_not_partly_overlap() -> None:
    memory, (cos, sin) = randn(4096), angles(4, 16)
    x = memory[:256].view(4, 2, 32)
    for start in (8, 32, 248):
        with pytest.raises(ValueError, match="out: expected x itself or memory of its own"):
            rotary_emb(x, cos, sin, interleaved=True, out=memory[start:][:256].view(4, 2, 32))
    transposed = memory[:256].view(2, 4, 32).transpose(0, 1)
    with pytest.raises(ValueError, match="memory partly shared with x"):
        rotary_emb(x, cos, sin, interleaved=True, out=transposed)
    both = torch.zeros(192, device="cuda")
    with pytest.raises(ValueError, match=r"out: expected memory of its own, .* of sin"):
        rotary_emb(
            x, cos, both[:64].view(4, 16), interleaved=True, out=both.view(BF16)[:256].view_as(x)
        )
    rotary_emb(x, cos, sin, interleaved=True, out=memory[256:512].view(4, 2, 32))


def test_mixed_devices_are_refused() -> None:
    x, (cos, sin) = randn(4, 2, 32), angles(4, 16)
    with pytest.raises(ValueError, match="cos: expected a CUDA tensor, got one on the CPU"):
        rotary_emb(x, cos.cpu(), sin, interleaved=True)
    with pytest.raises(ValueError, match="out: expected a CUDA tensor"):
        rotary_emb(x, cos, sin, interleaved=True, out=torch.empty(4, 2, 32, dtype=BF16))


@pytest.mark.parametrize("name", ["x", "cos", "sin", "out"])
def test_gradients_are_not_lost(name: str) -> None:
    cos, sin = angles(4, 16)
    arguments: dict[str, Any] = {"x": randn(4, 2, 32), "cos": cos, "sin": sin}
    arguments["out"] = torch.empty_like(arguments["x"])
    arguments[name].requires_grad_()
    with (
        torch.enable_grad(),
        pytest.raises(RuntimeError, match=f"{name}: requires grad, and rotary_emb has no backward"),
    ):
        rotary_emb(**arguments, interleaved=True)
    with torch.no_grad():
        assert not rotary_emb(**{**arguments, "out": None}, interleaved=True).requires_grad


def test_opcheck() -> None:
    x, (cos, sin) = randn(2, 5, 3, 32), angles(5, 16)
    ops = torch.ops.astrai_attention
    torch.library.opcheck(ops.rotary_emb.default, (x, cos, sin, True))
    torch.library.opcheck(ops.rotary_emb.default, (x[:, :, 1:], cos, sin, False))
    torch.library.opcheck(ops.rotary_emb_out.default, (x, cos, sin, True, torch.empty_like(x)))
    torch.library.opcheck(ops.rotary_emb_.default, (x, cos, sin, False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("interleaved", [False, True])
def test_torch_compile_fullgraph(interleaved: bool) -> None:
    cos, sin = angles(5, 32)

    def heads(fused: Tensor) -> tuple[Tensor, Tensor]:
        q, k = fused[:, :, :6], fused[:, :, 6:8]
        k = rotary_emb(k, cos, sin, interleaved=interleaved, out=k)
        return rotary_emb(q, cos, sin, interleaved=interleaved) * 2, k + 1

    fused = randn(2, 5, 10, 64)
    again = fused.clone()
    compiled = torch.compile(heads, fullgraph=True)
    for found, expected in zip(compiled(fused), heads(again), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(fused, again)


def test_the_plan_knows_the_image() -> None:
    info = _attention.device_info(0)
    major, minor = torch.cuda.get_device_capability()
    assert info.device_arch == 10 * major + minor
    # compute_80 PTX is 80 on any GPU.
    assert info.image_arch == image_arch(_family.SASS, _family.PTX, info.device_arch)
    assert info.sm_count == torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(RuntimeError, match=r"cudaGetDevice|cudaSetDevice|invalid device"):
        _attention.device_info(100)
