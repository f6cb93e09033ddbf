# SPDX-License-Identifier: Apache-2.0
"""Time of the family's ops on this GPU, as rows of docs/benchmarks/<gpu>/attention.json.

A figure is the time per node of a CUDA graph whose operands come from HBM; see kernelkit.timing.
Providers: `astrai`, `torch` (unfused torch ops), and `copy` (torch's copy of the same tensor: what
the memory system gives).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from astrai_attention import rotary_emb
from kernelkit import reference, timing
from kernelkit.cases import ROTARY_TOKENS, RotaryCase
from kernelkit.results import Environment, Row, merge, results_path

BF16 = torch.bfloat16
# Queries and keys of a layer with grouped-query attention.
ROTARY_HEADS = (32, 8)
ROTARY_HEAD_DIM = 128
# A copy of less is all launch.
COPY_BYTES = 64_000_000


def randn(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=BF16).normal_()


def max_error(out: Tensor, ref: Tensor) -> float:
    return (out.double() - ref).abs().max().item()


def complex_product(x: Tensor, turn: Tensor) -> Tensor:
    """Interleaved pairs as complex numbers, times ``cos + i sin``."""
    product = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn
    return torch.view_as_real(product).flatten(-2).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split pairs as transformers' Llama has them, with angles of whole heads in bf16."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def torch_rotary(cos: Tensor, sin: Tensor, interleaved: bool) -> Callable[[Tensor], Tensor]:
    """The unfused path; its tables are made outside of the measurement."""
    if interleaved:
        return partial(complex_product, turn=torch.complex(cos, sin).unsqueeze(-2))
    whole = [torch.cat((t, t), -1).unsqueeze(-2).to(BF16) for t in (cos, sin)]
    return partial(rotate_half, cos=whole[0], sin=whole[1])


def bench_rotary(env: Environment) -> Iterator[Row]:
    for batch, seq in ROTARY_TOKENS:
        angle = torch.rand(seq, ROTARY_HEAD_DIM // 2, device="cuda") * 6.4
        cos, sin = angle.cos(), angle.sin()
        for heads in ROTARY_HEADS:
            sizes = (batch, seq, heads, ROTARY_HEAD_DIM)
            moved = RotaryCase(*sizes, interleaved=True).bytes_moved
            xs = [randn(*sizes) for _ in range(timing.operand_sets(moved))]
            for interleaved in (True, False):
                case = RotaryCase(*sizes, interleaved)
                # One sequence: in float64 it is four times as large.
                ref = reference.rotary(xs[0][:1], cos, sin, interleaved=interleaved)
                providers: dict[str, Callable[[Tensor], Tensor]] = {
                    "torch": torch_rotary(cos, sin, interleaved),
                    "astrai": partial(rotary_emb, cos=cos, sin=sin, interleaved=interleaved),
                }
                if moved >= COPY_BYTES:
                    providers["copy"] = torch.clone
                for provider, rotary in providers.items():
                    yield env.row(
                        "attention",
                        "rotary_emb",
                        case.label,
                        provider,
                        timing.node_time_us([partial(rotary, x) for x in xs]),
                        bytes_moved=2 * xs[0].nbytes if provider == "copy" else case.bytes_moved,
                        error=None if provider == "copy" else max_error(rotary(xs[0])[:1], ref),
                    )


def bench_host(env: Environment) -> Iterator[Row]:
    """Host time of one eager call: a small problem, so that the launch queue never fills."""
    x, angle = randn(1, 1, 32, 128), torch.rand(1, 64, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    providers: dict[str, Callable[[Tensor], Tensor]] = {
        "torch": torch_rotary(cos, sin, True),
        "astrai": partial(rotary_emb, cos=cos, sin=sin, interleaved=True),
    }
    for provider, rotary in providers.items():
        yield env.row(
            "attention",
            "host",
            "rotary_emb,B=1,S=1,H=32,d=128",
            provider,
            timing.host_time_us(partial(rotary, x)),
        )


BENCHMARKS = {
    "rotary": bench_rotary,
    "host": bench_host,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results", type=Path, required=True, help="folder of <gpu>/attention.json"
    )
    parser.add_argument("--only", choices=BENCHMARKS, nargs="*", default=list(BENCHMARKS))
    args = parser.parse_args()
    env = Environment.current()
    torch.manual_seed(0)
    with torch.no_grad():
        for name in args.only:
            rows = []
            for row in BENCHMARKS[name](env):
                rows.append(row)
                print(
                    f"{row.op:13} {row.case:36} {row.provider:8} {row.median_us:9.2f} us",
                    flush=True,
                )
            merge(results_path(args.results, env.gpu, "attention"), rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
