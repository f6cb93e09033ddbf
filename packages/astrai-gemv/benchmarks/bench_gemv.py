# SPDX-License-Identifier: Apache-2.0
"""Time of the family's ops on this GPU beside torch's, as rows of docs/benchmarks/<gpu>/gemv.json.

Every figure is the time per node of a CUDA graph whose weights come from HBM; see kernelkit.timing.
Providers: `astrai` (every read after griddepcontrol.wait), `astrai-static` (static_weights=True),
`cublas` (F.linear) and `torch` (unfused torch ops).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_gemv import add_rms_norm, bf16_gemv, bf16_swiglu
from kernelkit import reference, timing
from kernelkit.cases import (
    CHAINS,
    HIDDEN_SIZES,
    LINEAR_SHAPES,
    SWIGLU_SHAPES,
    TOKENS,
    Chain,
    GemvCase,
    NormCase,
    SwigluCase,
)
from kernelkit.results import Environment, Row, merge, results_path

BF16 = torch.bfloat16
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

LINEARS: dict[str, Linear] = {
    "cublas": F.linear,
    "astrai": bf16_gemv,
    "astrai-static": partial(bf16_gemv, static_weights=True),
}


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=BF16).normal_(std=scale)


def max_error(out: Tensor, ref: Tensor) -> float:
    return (out.double() - ref).abs().max().item()


def bench_linear(env: Environment) -> Iterator[Row]:
    for n, k in LINEAR_SHAPES:
        weights = [randn(n, k) for _ in range(timing.operand_sets(2 * n * k))]
        for m in TOKENS:
            case = GemvCase(m, n, k)
            x = randn(m, k)
            # fp32 bounds an error of bf16 where float64 would not fit beside the weights.
            exact = torch.float64 if n * k < 1e8 else torch.float32
            ref = (x.to(exact) @ weights[0].to(exact).T).double()
            for provider, linear in LINEARS.items():
                yield env.row(
                    "gemv",
                    "bf16_gemv",
                    case.label,
                    provider,
                    timing.node_time_us([partial(linear, x, w) for w in weights]),
                    bytes_moved=case.bytes_moved,
                    flops=case.flops,
                    error=max_error(linear(x, weights[0]), ref),
                )


def unfused_swiglu(x: Tensor, up: Tensor, gate: Tensor) -> Tensor:
    return F.linear(x, up) * F.silu(F.linear(x, gate))


def bench_swiglu(env: Environment) -> Iterator[Row]:
    providers: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "torch": unfused_swiglu,
        "astrai": bf16_swiglu,
        "astrai-static": partial(bf16_swiglu, static_weights=True),
    }
    for n, k in SWIGLU_SHAPES:
        sets = timing.operand_sets(4 * n * k)
        weights = [(randn(n, k), randn(n, k)) for _ in range(sets)]
        for m in TOKENS:
            case = SwigluCase(m, n, k)
            x = randn(m, k, scale=k**-0.5)
            ref = reference.swiglu(x, *weights[0]) if n * k < 1e8 else None
            for provider, swiglu in providers.items():
                error = None if ref is None else max_error(swiglu(x, *weights[0]), ref)
                yield env.row(
                    "gemv",
                    "bf16_swiglu",
                    case.label,
                    provider,
                    timing.node_time_us([partial(swiglu, x, *pair) for pair in weights]),
                    bytes_moved=case.bytes_moved,
                    flops=case.flops,
                    error=error,
                )


def torch_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-5), h


def bench_norm(env: Environment) -> Iterator[Row]:
    providers: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "torch": torch_norm,
        "astrai": partial(add_rms_norm, eps=1e-5),
        "astrai-static": partial(add_rms_norm, eps=1e-5, static_weights=True),
    }
    for k in HIDDEN_SIZES:
        for m in TOKENS:
            case = NormCase(m, k)
            x, residual, weight = randn(m, k), randn(m, k), randn(k)
            ref = reference.add_rms_norm(x, residual, weight, 1e-5)[0]
            for provider, norm in providers.items():
                yield env.row(
                    "gemv",
                    "add_rms_norm",
                    case.label,
                    provider,
                    timing.node_time_us([partial(norm, x, residual, weight)]),
                    bytes_moved=case.bytes_moved,
                    error=max_error(norm(x, residual, weight)[0], ref),
                )


class ChainRun:
    """Two layers of a model's projections with weights of their own, applied in turn."""

    def __init__(self, chain: Chain, m: int) -> None:
        self.chain = chain
        self.x = randn(m, chain.hidden)
        self.weights = [
            {
                p.name: (randn(p.n, p.k, scale=p.k**-0.5), randn(p.n) if p.bias else None)
                for p in chain.projections
            }
            for _ in range(timing.operand_sets(chain.weight_bytes))
        ]

    def layer(self, linear: Linear, x: Tensor, index: int) -> Tensor:
        outputs: dict[str | None, Tensor] = {None: x}
        weights = self.weights[index % len(self.weights)]
        y = x
        for p in self.chain.projections:
            source = outputs[p.source]
            # The first k outputs of each token where a projection takes fewer than there are.
            flat = source.view(-1)[: x.shape[0] * p.k].view(x.shape[0], p.k)
            y = outputs[p.name] = linear(flat, *weights[p.name])
        return y

    def run(self, linear: Linear, layers: int) -> Tensor:
        y = self.x
        for index in range(layers):
            y = self.layer(linear, y, index)
        return y


def argmax_differs(out: Tensor, ref: Tensor) -> int:
    """Rows whose maximum is another one, ties within 2 ulp of bf16 apart."""
    chosen = ref.gather(-1, out.argmax(-1, keepdim=True)).float()
    best = ref.max(-1, keepdim=True).values.float()
    return int((best - chosen > 2.0**-6 * best.abs()).sum())


def bench_chains(env: Environment) -> Iterator[Row]:
    for chain in CHAINS:
        layers = -(-timing.MIN_NODES // len(chain.projections))
        for m in TOKENS:
            work = ChainRun(chain, m)
            layers = -(-layers // len(work.weights)) * len(work.weights)
            ref = work.run(F.linear, 1)
            for provider, linear in LINEARS.items():
                if differing := argmax_differs(work.run(linear, 1), ref):
                    raise AssertionError(
                        f"{chain.model}, M={m}: {differing} rows choose differently"
                    )
                graph = timing.capture([partial(work.run, linear, layers)])
                yield env.row(
                    "gemv",
                    "chain",
                    f"model={chain.model},M={m}",
                    provider,
                    timing.replay_time_us(graph) / layers,
                    bytes_moved=chain.weight_bytes,
                    error=max_error(work.run(linear, 1), ref.double()),
                )


def bench_host(env: Environment) -> Iterator[Row]:
    """Host time of one eager call: a small problem, so that the launch queue never fills."""
    x, w = randn(1, 64), randn(64, 64)
    for provider in ("cublas", "astrai"):
        call = partial(LINEARS[provider], x, w)
        yield env.row(
            "gemv", "host", "bf16_gemv,M=1,N=64,K=64", provider, timing.host_time_us(call)
        )


BENCHMARKS = {
    "linear": bench_linear,
    "swiglu": bench_swiglu,
    "norm": bench_norm,
    "chains": bench_chains,
    "host": bench_host,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of <gpu>/gemv.json")
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
                    f"{row.op:13} {row.case:32} {row.provider:14} {row.median_us:9.2f} us",
                    flush=True,
                )
            merge(results_path(args.results, env.gpu, "gemv"), rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
