# SPDX-License-Identifier: Apache-2.0
"""Values on a GPU, against float64, in hostile memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from operands import BF16, randn
from torch import Tensor

from astrai_gemv import add_rms_norm, bf16_gemv, bf16_swiglu
from kernelkit import reference
from kernelkit.cases import LINEAR_SHAPES
from kernelkit.compare import assert_close_to_reference
from kernelkit.poison import guarded_output, misaligned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

TOKENS = range(1, 9)
SMALL = pytest.mark.sanitize


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
    if max(t.numel() for t in tensors if t is not None) > 2_200_000:
        return list(tensors)
    return [t if t is None else t.cpu() for t in tensors]


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(
    ("n", "k"),
    [s for s in LINEAR_SHAPES if s[0] * s[1] < 1e8]
    + [(1, 1), (3, 2), (17, 8), (133, 1000), (264, 5000), (1000, 129), (40, 20000), (2113, 520)]
    + [(4300, 5000), (4300, 8192)],
)
def test_gemv(m: int, n: int, k: int) -> None:
    check_gemv(randn(m, k), randn(n, k), randn(n) if m % 2 else None)


@SMALL
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((1, 40, 264), (8, 133, 129), (3, 7, 4105), (2, 2200, 40), (2, 257, 8200)),
        # Clusters share K.
        *((5, 300, 4608), (8, 40, 4104), (1, 1, 8200)),
    ],
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


@pytest.mark.parametrize(
    ("n", "k"),
    [
        *((1, 4096), (256, 16384), (1000, 4096), (2048, 2048), (2048, 8192), (133, 4095)),
        # Up to 4 tokens hold two windows of x, more have one after the other; then all do.
        *((4300, 4104), (4300, 5000), (4300, 8192), (4300, 9224), (4300, 14336)),
    ],
)
@pytest.mark.parametrize("op", ["gemv", "swiglu"])
def test_a_token_does_not_depend_on_those_beside_it(op: str, n: int, k: int) -> None:
    """Whatever the plan: one CTA for a row, or clusters that share K."""
    k -= k % 8 if op == "swiglu" else 0
    x, up, gate = randn(8, k, scale=k**-0.5), randn(n, k), randn(n, k)

    def call(x: Tensor) -> Tensor:
        return bf16_gemv(x, up) if op == "gemv" else bf16_swiglu(x, up, gate)

    out = call(x)
    for m in range(1, 8):
        assert torch.equal(call(x[:m]), out[:m])
        assert torch.equal(call(x[m]), out[m])


@pytest.mark.parametrize("m", [1, 4, 5])
@pytest.mark.parametrize(("n", "k"), [(2048, 8192), (4000, 5000), (130_000, 1024)])
def test_gemv_of_static_weights(m: int, n: int, k: int) -> None:
    """Two CTAs for each SM, in clusters up to 4 tokens and alone."""
    check_gemv(randn(m, k), randn(n, k), randn(n), static=True)


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(
    ("n", "k"), [(8192, 2048), (1000, 4096), (133, 8), (576, 1536), (77, 5000), (2200, 5000)]
)
def test_swiglu(m: int, n: int, k: int) -> None:
    check_swiglu(randn(m, k, scale=k**-0.5), randn(n, k), randn(n, k))


@SMALL
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 40, 264), (8, 133, 136), (2, 129, 8200), (3, 300, 4608), (5, 7, 4104)]
)
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
    # The results get this memory.
    poison = [torch.full(x.shape, torch.nan, device="cuda", dtype=BF16) for _ in range(2)]
    del poison
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    ref_out, ref_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, ref_total.to(BF16))
    unit = (total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-5)).to(
        BF16
    )
    assert_close_to_reference(out, ref_out, weight * unit)
