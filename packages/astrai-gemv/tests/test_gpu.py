# SPDX-License-Identifier: Apache-2.0
"""The kernels on a GPU, against float64, in hostile memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_gemv import _gemv, add_rms_norm, bf16_gemv, bf16_swiglu
from kernelkit import reference
from kernelkit.cases import LINEAR_SHAPES
from kernelkit.compare import assert_close_to_reference
from kernelkit.poison import guarded_output, misaligned

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
TOKENS = range(1, 9)
SMALL = pytest.mark.sanitize


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.cuda.synchronize()


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def check_gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_offset: int = 0, static: bool = False
) -> None:
    shape = (*x.shape[:-1], weight.shape[0])
    out = guarded_output(shape, device="cuda", offset=out_offset)
    assert bf16_gemv(x, weight, bias, out=out.tensor, static_weights=static) is out.tensor
    out.check()
    tensors = host_if_small(out.tensor, x, weight, bias)
    assert_close_to_reference(tensors[0], reference.linear(*tensors[1:]), F.linear(*tensors[1:]))


def host_if_small(*tensors: Tensor | None) -> list[Tensor | None]:
    """Copies on the CPU of small problems: libraries' kernels are not clean under the sanitizer."""
    if max(t.numel() for t in tensors if t is not None) > 2_000_000:
        return list(tensors)
    return [t if t is None else t.cpu() for t in tensors]


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(
    ("n", "k"),
    [s for s in LINEAR_SHAPES if s[0] * s[1] < 1e8]
    + [(1, 1), (3, 2), (17, 8), (133, 1000), (264, 5000), (1000, 129), (40, 20000), (2113, 520)],
)
def test_gemv(m: int, n: int, k: int) -> None:
    check_gemv(randn(m, k), randn(n, k), randn(n) if m % 2 else None)


@SMALL
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 40, 264), (8, 133, 129), (5, 300, 4608), (3, 7, 4105), (2, 2200, 40)]
)
@pytest.mark.parametrize("static", [False, True])
def test_gemv_small(m: int, n: int, k: int, static: bool) -> None:
    check_gemv(randn(m, k), randn(n, k), randn(n), static=static)


@SMALL
@pytest.mark.parametrize("offset", [1, 4, 7])
@pytest.mark.parametrize("k", [120, 121, 4100])
def test_gemv_misaligned(offset: int, k: int) -> None:
    """Every operand off its boundary, NaN before, between and after the rows."""
    x = misaligned(randn(4, k), offset)
    weight = misaligned(randn(50, k), 8 - offset, row_padding=offset)
    bias = misaligned(randn(50), offset)
    check_gemv(x, weight, bias, out_offset=offset)


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("padding", [0, 1, 2, 4])
@pytest.mark.parametrize("k", [2047, 2048, 4099])
def test_gemv_all_alignments(offset: int, padding: int, k: int) -> None:
    weight = misaligned(randn(300, k), offset, row_padding=padding)
    check_gemv(misaligned(randn(3, k), (offset * 3) % 8), weight, None, out_offset=offset)


def test_gemv_rows_of_a_wider_matrix() -> None:
    wide = randn(96, 3 * 512)
    wide[:, :512] = torch.nan
    wide[:, 1024:] = torch.nan
    check_gemv(randn(2, 512), wide[:, 512:1024], None)


@SMALL
def test_gemv_one_dimensional_x() -> None:
    x, weight = randn(520), randn(70, 520)
    out = bf16_gemv(x, weight)
    assert out.shape == (70,)
    assert torch.equal(out, bf16_gemv(x[None], weight)[0])


def test_gemv_does_not_mix_tokens() -> None:
    """A NaN or infinity stays in its token's row and its weight's column."""
    x, weight = randn(8, 640), randn(200, 640)
    clean = bf16_gemv(x, weight)
    x[3, 77] = torch.nan
    weight[20, 5] = torch.inf
    out = bf16_gemv(x, weight)
    assert out[3].isnan().all()
    assert not out[[0, 1, 2, 4, 5, 6, 7], 20].isfinite().any()
    keep = torch.ones_like(out, dtype=torch.bool)
    keep[3], keep[:, 20] = False, False
    assert torch.equal(out[keep], clean[keep])


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(
    ("n", "k"), [(8192, 2048), (1000, 4096), (133, 8), (576, 1536), (77, 5000)]
)
def test_swiglu(m: int, n: int, k: int) -> None:
    check_swiglu(randn(m, k, scale=k**-0.5), randn(n, k), randn(n, k))


@SMALL
@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 264), (8, 133, 136), (3, 300, 4608)])
def test_swiglu_small(m: int, n: int, k: int) -> None:
    check_swiglu(randn(m, k, scale=k**-0.5), randn(n, k), randn(n, k))


def check_swiglu(x: Tensor, up: Tensor, gate: Tensor) -> None:
    out = guarded_output((x.shape[0], up.shape[0]), device="cuda")
    bf16_swiglu(x, up, gate, out=out.tensor)
    out.check()
    # Another plan may be made for it, which changes no bit.
    assert torch.equal(bf16_swiglu(x, up, gate, static_weights=True), out.tensor)
    got, x, up, gate = host_if_small(out.tensor, x, up, gate)
    unfused = F.linear(x, up) * F.silu(F.linear(x, gate))
    assert_close_to_reference(got, reference.swiglu(x, up, gate), unfused)


def test_swiglu_keeps_the_rounding_of_the_unfused_path() -> None:
    """With exact dot products (small integers) only the rounding is left: it must be equal."""
    x = torch.randint(-2, 3, (4, 64), device="cuda").to(BF16)
    up = torch.randint(-2, 3, (96, 64), device="cuda").to(BF16)
    gate = torch.randint(-1, 2, (96, 64), device="cuda").to(BF16)
    unfused = F.linear(x, up) * F.silu(F.linear(x, gate))
    difference = (bf16_swiglu(x, up, gate).float() - unfused.float()).abs()
    # exp of the device differs by an ulp of fp32 from torch's: silu may round the other way.
    assert (difference <= 2.0**-7 * unfused.float().abs()).all()
    assert (difference == 0).float().mean() > 0.99


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("hidden", [576, 4096])
def test_add_rms_norm(m: int, hidden: int) -> None:
    check_norm(randn(m, hidden), randn(m, hidden), randn(hidden))


@SMALL
@pytest.mark.parametrize("hidden", [1, 8, 100, 2048, 8200, 20001])
def test_add_rms_norm_small(hidden: int) -> None:
    check_norm(randn(3, hidden), randn(3, hidden), randn(hidden))
    check_norm(misaligned(randn(3, hidden), 3), randn(3, hidden), misaligned(randn(hidden), 5))


def check_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    ref_out, ref_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, ref_total.to(BF16))
    unit = (total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-5)).to(
        BF16
    )
    assert_close_to_reference(out, ref_out, weight * unit)


OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gemv": lambda x, w, _: bf16_gemv(x, w),
    "gemv_static": lambda x, w, _: bf16_gemv(x, w, static_weights=True),
    "swiglu": bf16_swiglu,
    "swiglu_static": lambda x, w, g: bf16_swiglu(x, w, g, static_weights=True),
    "norm": lambda x, w, _: add_rms_norm(x, x, w[0], 1e-5)[0],
}


@pytest.mark.parametrize("name", OPS)
def test_two_runs_are_bitwise_equal(name: str) -> None:
    x, w, g = randn(8, 4096), randn(1111, 4096), randn(1111, 4096)
    first = OPS[name](x, w, g)
    for _ in range(20):
        assert torch.equal(OPS[name](x, w, g), first)


@pytest.mark.parametrize("name", OPS)
def test_the_current_stream_is_used(name: str) -> None:
    x, w, g = randn(2, 4096), randn(512, 4096), randn(512, 4096)
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
def test_graph_replay_with_changed_inputs(name: str) -> None:
    x, w, g = randn(4, 2048), randn(300, 2048), randn(300, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS[name](x, w, g)
    for _ in range(3):
        x.copy_(randn(4, 2048))
        w.copy_(randn(300, 2048))
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


@pytest.mark.parametrize("in_graph", [False, True])
def test_weights_written_by_the_preceding_kernel(in_graph: bool) -> None:
    """The preceding kernel lets this one start early and writes its weight late.

    `first` runs 50 us and triggers its dependents at once; its output is the second call's weight,
    poisoned before. Reading it before griddepcontrol.wait gives NaN.
    """
    x1, w1 = randn(8, 1024, scale=0.03), randn(65536, 1024)
    x2 = randn(4, 1024)
    written = torch.empty(8, 65536, device="cuda", dtype=BF16)

    def chain() -> Tensor:
        written.fill_(torch.nan)
        bf16_gemv(x1, w1, out=written)
        return bf16_gemv(x2, written.view(512, 1024))

    expected = F.linear(x2, F.linear(x1, w1).view(512, 1024)).double()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [chain() for _ in range(8)]
        graph.replay()
    else:
        results = [chain() for _ in range(30)]
    for result in results:
        assert_close_to_reference(result, expected, result, floor=0.05 * expected.std().item())


@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize("k", [2048, 5120, 8192])
def test_x_written_by_the_preceding_kernel_with_static_weights(k: int, m: int) -> None:
    """One window of x, and two, of 3 chunks and of 4."""
    weights = [randn(k, k, scale=k**-0.5) for _ in range(4)]
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


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="weight: expected a CUDA tensor, got one on the CPU"):
        bf16_gemv(randn(1, 64), randn(32, 64).cpu())
    with pytest.raises(ValueError, match="out: expected a CUDA tensor"):
        bf16_gemv(randn(1, 64), randn(32, 64), out=torch.empty(1, 32, dtype=BF16))


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
    assert info.image_arch <= info.device_arch
    assert info.sm_count == torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(RuntimeError, match=r"cudaGetDevice|cudaSetDevice|invalid device"):
        _gemv.device_info(100)
