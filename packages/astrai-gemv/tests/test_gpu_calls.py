# SPDX-License-Identifier: Apache-2.0
"""How the ops behave on a GPU: streams, graphs, dependent launches, gradients, torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operands import BF16, randn
from torch import Tensor

from astrai_gemv import _family, _gemv, add_rms_norm, bf16_gemv, bf16_swiglu
from kernelkit.wheels import image_arch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gemv": lambda x, w, _: bf16_gemv(x, w),
    "gemv_static": lambda x, w, _: bf16_gemv(x, w, static_weights=True),
    "swiglu": bf16_swiglu,
    "swiglu_static": lambda x, w, g: bf16_swiglu(x, w, g, static_weights=True),
    "norm": lambda x, w, _: add_rms_norm(x, x, w[0], 1e-5)[0],
    "norm_static": lambda x, w, _: add_rms_norm(x, x, w[0], 1e-5, static_weights=True)[0],
}


# A CTA for each row, clusters of 2 that share a long K, and clusters of 8.
SOURCES = pytest.mark.parametrize(("n", "k"), [(1111, 4096), (1111, 8192), (100, 16384)])


@pytest.mark.parametrize("name", OPS)
@SOURCES
def test_two_runs_are_bitwise_equal(name: str, n: int, k: int) -> None:
    x, w, g = randn(8, k), randn(n, k), randn(n, k)
    first = OPS[name](x, w, g)
    for _ in range(20):
        assert torch.equal(OPS[name](x, w, g), first)


@pytest.mark.parametrize("name", OPS)
@SOURCES
def test_the_current_stream_is_used(name: str, n: int, k: int) -> None:
    x, w, g = randn(2, k), randn(n, k), randn(n, k)
    expected = OPS[name](x, w, g)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Not on the side stream, the op would run before this is over.
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        out = OPS[name](late, w, g)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", OPS)
@SOURCES
def test_graph_replay_with_changed_inputs(name: str, n: int, k: int) -> None:
    x, w, g = randn(4, k), randn(n, k), randn(n, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS[name](x, w, g)
    for _ in range(3):
        x.copy_(randn(4, k))
        w.copy_(randn(n, k))
        graph.replay()
        assert torch.equal(y, OPS[name](x, w, g))


def test_first_call_may_be_a_capture() -> None:
    """Loading the module and raising the shared-memory limit are legal in a capture."""
    import subprocess
    import sys

    code = (
        "import torch; from astrai_gemv import bf16_gemv\n"
        "x = torch.ones(1, 64, device='cuda', dtype=torch.bfloat16)\n"
        "w = torch.ones(32, 64, device='cuda', dtype=torch.bfloat16)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): y = bf16_gemv(x, w)\n"
        "graph.replay(); print(y.float().unique().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[64.0]\n"


LATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gemv": lambda x, w: bf16_gemv(x, w.view(-1, x.shape[1])),
    "swiglu": lambda x, w: bf16_swiglu(x, *w.view(2, -1, x.shape[1])),
    "norm": lambda x, w: add_rms_norm(x, x, w.view(-1)[-x.shape[1] :], 1e-5)[0],
}


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("k", [1024, 8192])
@pytest.mark.parametrize("name", LATE)
def test_weights_written_by_the_preceding_kernel(name: str, k: int, in_graph: bool) -> None:
    """The preceding kernel lets this one start early and writes its weight late.

    `first` runs 50 us and triggers its dependents at once; its output is the second call's weight,
    poisoned before. Reading it before griddepcontrol.wait gives NaN.
    """
    x1, w1 = randn(8, 1024, scale=0.03), randn(65536, 1024)
    x2 = randn(4, k)
    written = torch.empty(8, 65536, device="cuda", dtype=BF16)

    def chain() -> Tensor:
        written.fill_(torch.nan)
        bf16_gemv(x1, w1, out=written)
        return LATE[name](x2, written)

    weight = bf16_gemv(x1, w1)
    torch.cuda.synchronize()
    expected = LATE[name](x2, weight)
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [chain() for _ in range(8)]
        graph.replay()
    else:
        results = [chain() for _ in range(30)]
    assert expected.isfinite().all()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize("n", [2048, 5120, 8192])
@pytest.mark.parametrize("k", [2048, 5120, 8192])
def test_x_written_by_the_preceding_kernel_with_static_weights(k: int, n: int, m: int) -> None:
    """One window of x, two of 3 chunks and of 4 (held at M = 2, in turn at M = 8), clusters; one
    CTA for each SM, and two."""
    weights = [randn(*shape, scale=shape[1] ** -0.5) for shape in [(n, k), (k, n)] * 2]
    x = randn(m, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for index in range(32):
            y = bf16_gemv(y, weights[index % 4], static_weights=True)
    graph.replay()
    expected = x
    for index in range(32):
        expected = bf16_gemv(expected, weights[index % 4])
        torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize(("name", "k"), [("gemv", 2047), ("swiglu", 2048), ("norm", 2048)])
def test_x_of_each_op_is_waited_for(name: str, k: int) -> None:
    """With static weights too, behind a kernel that lets its dependents start early."""
    w, g, ones, zeros = randn(k, k), randn(k, k), randn(k).fill_(1), randn(4, k).zero_()
    first = randn(4, k)

    def chain(after: Callable[[], None]) -> Tensor:
        x = first
        for _ in range(16):
            # Of one size: what swiglu makes of small numbers is smaller by far.
            x = bf16_gemv(x, g) if name == "norm" else add_rms_norm(x, zeros, ones, 1e-5)[0]
            after()
            x = OPS[f"{name}_static"](x, w, g)
            after()
        return x

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(lambda: None)
    for _ in range(10):
        graph.replay()
        assert torch.equal(y, expected)


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="weight: expected a CUDA tensor, got one on the CPU"):
        bf16_gemv(randn(1, 64), randn(32, 64).cpu())
    with pytest.raises(ValueError, match="out: expected a CUDA tensor"):
        bf16_gemv(randn(1, 64), randn(32, 64), out=torch.empty(1, 32, dtype=BF16))


def test_operands_may_be_on_any_device() -> None:
    """Whichever is current; on GPUs of one kind with the same result."""
    operands = randn(2, 8192), randn(64, 8192), randn(64, 8192)
    expected = {name: op(*operands).cpu() for name, op in OPS.items()}
    for index in range(torch.cuda.device_count()):
        there = [x.to(f"cuda:{index}") for x in operands]
        for name, op in OPS.items():
            y = op(*there)
            assert y.device == there[0].device
            assert torch.equal(y.cpu(), expected[name]), (name, index)
        if index > 0:
            with pytest.raises(ValueError, match=f"weight: expected .*cuda:0.*cuda:{index}"):
                bf16_gemv(operands[0], there[1])
    assert torch.cuda.current_device() == 0


def test_parameters_are_taken_without_grad() -> None:
    x, weight = randn(2, 64), torch.nn.Parameter(randn(32, 64))
    assert not bf16_gemv(x, weight).requires_grad


def test_autograd_sees_that_out_was_written() -> None:
    x, weight = randn(2, 64), randn(32, 64)
    out, leaf = randn(2, 32), randn(2, 32).requires_grad_()
    with torch.enable_grad():
        loss = (out * leaf).sum()
    for write in (
        lambda: bf16_gemv(x, weight, out=out),
        lambda: bf16_swiglu(x, weight, weight, out=out),
        lambda: torch.ops.astrai_gemv.bf16_gemv_out(x, weight, None, out, False),
    ):
        version = out._version
        write()
        assert out._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_running_out_of_memory_is_torchs_error() -> None:
    # First, or the operands take part of a larger cached block, whose rest would do for the output.
    torch.cuda.empty_cache()
    x, weight = randn(8, 1), randn(2**21, 1)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 24 * 2**20, dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            bf16_gemv(x, weight)
    finally:
        del hog
        torch.cuda.empty_cache()
    assert bf16_gemv(x, weight).shape == (8, 2**21)


def test_the_allocator_knows_the_output() -> None:
    """Memory that another stream still uses is not handed out again."""
    result = bf16_gemv(randn(8, 64), randn(100_000, 64))
    address, side = result.data_ptr(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
    result.record_stream(side)
    del result
    again = [torch.empty(8, 100_000, device="cuda", dtype=BF16) for _ in range(4)]
    assert address not in {tensor.data_ptr() for tensor in again}


def test_opcheck() -> None:
    x, w, g = randn(3, 64), randn(32, 64), randn(32, 64)
    ops = torch.ops.astrai_gemv
    out = torch.empty(3, 32, device="cuda", dtype=BF16)
    torch.library.opcheck(ops.bf16_gemv.default, (x, w, None, False))
    torch.library.opcheck(ops.bf16_gemv.default, (x, w, randn(32), True))
    torch.library.opcheck(ops.bf16_gemv_out.default, (x, w, None, out, False))
    torch.library.opcheck(ops.bf16_swiglu.default, (x, w, g, False))
    torch.library.opcheck(ops.bf16_swiglu_out.default, (x, w, g, out, False))
    torch.library.opcheck(ops.add_rms_norm.default, (x, x, w[0], 1e-5, False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_fullgraph() -> None:
    x, w, g, down = randn(2, 256), randn(512, 256), randn(512, 256), randn(256, 512)

    def mlp(x: Tensor) -> Tensor:
        normed, residual = add_rms_norm(x, x, w[0], 1e-5)
        return residual + bf16_gemv(bf16_swiglu(normed, w, g), down)

    assert torch.equal(torch.compile(mlp, fullgraph=True)(x), mlp(x))


def test_the_plan_knows_the_image() -> None:
    info = _gemv.device_info(0)
    major, minor = torch.cuda.get_device_capability()
    assert info.device_arch == 10 * major + minor
    # compute_80 PTX is 80 on any GPU.
    assert info.image_arch == image_arch(_family.SASS, _family.PTX, info.device_arch)
    assert info.sm_count == torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(RuntimeError, match=r"cudaGetDevice|cudaSetDevice|invalid device"):
        _gemv.device_info(100)
