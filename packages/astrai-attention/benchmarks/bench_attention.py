# SPDX-License-Identifier: Apache-2.0
"""Time of the family's ops on this GPU, as rows of docs/benchmarks/<gpu>/attention.json.

A figure is the time per node of a CUDA graph whose operands come from HBM; see kernelkit.timing.
Providers: `astrai`, `torch` (unfused torch ops), and `copy` (torch's copy of the same tensor: what
the memory system gives); `cudnn` and `flash` (of scaled_dot_product_attention, over contiguous
tensors), and over pages `flashinfer`, if it is installed: of decode the faster of its two kernels.
`astrai-serial` is decode without programmatic dependent launch, `astrai-static` with
static_cache=True; `astrai-paged16` is prefill over pages of 16 tokens, in any order;
`astrai-capacity131072` is decode with a plan for sequences of up to that many tokens, as a graph
that outlives its lengths has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import flashinfer_peer
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from astrai_attention import (
    _attention,
    attn_decode,
    attn_paged_decode,
    attn_paged_prefill,
    attn_prefill,
    q_tile_schedule,
    rotary_emb,
)
from kernelkit import reference, timing
from kernelkit.cases import (
    DECODE_PAGES,
    DECODE_SHAPES,
    PREFILL_CASES,
    ROTARY_TOKENS,
    DecodeCase,
    PrefillCase,
    RotaryCase,
)
from kernelkit.results import Environment, Row, merge, results_path

BF16 = torch.bfloat16
# Queries and keys of a layer with grouped-query attention.
ROTARY_HEADS = (32, 8)
ROTARY_HEAD_DIM = 128
# A copy of less is all launch.
COPY_BYTES = 64_000_000
PAGE_SIZE = 16


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


CAPACITY = 131072

SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
Decode = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa_decode(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def paged_decode(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, static: bool = False
) -> Tensor:
    return attn_paged_decode(q, k, v, table, lengths, page_size=k.shape[1], static_cache=static)


def serial(decode: Decode) -> Decode:
    """The same, launched once the kernel before it has ended."""

    def call(*operands: Tensor) -> Tensor:
        _attention.set_dependent_launches(False)
        try:
            return decode(*operands)
        finally:
            _attention.set_dependent_launches(True)

    return call


def decode_row(
    env: Environment,
    case: DecodeCase,
    provider: str,
    decodes: list[Decode],
    sets: list[tuple[Tensor, Tensor, Tensor]],
    ref: Tensor,
) -> Row:
    """Of the fastest of `decodes`."""
    times = [timing.node_time_us([partial(decode, *x) for x in sets]) for decode in decodes]
    best = min(range(len(decodes)), key=times.__getitem__)
    return env.row(
        "attention",
        "attn_paged_decode" if case.page else "attn_decode",
        case.label,
        provider,
        times[best],
        bytes_moved=case.bytes_moved,
        flops=case.flops,
        error=max_error(decodes[best](*sets[0])[0, 0], ref),
    )


def bench_decode(env: Environment) -> Iterator[Row]:
    """Contiguous K and V, then the same memory as pages in random order."""
    for shape in DECODE_SHAPES:
        case = DecodeCase(*shape)
        batch, kv_len, q_heads, kv_heads, head_dim = shape
        kv = (batch, kv_len, kv_heads, head_dim)
        sets = [
            (randn(batch, 1, q_heads, head_dim), randn(*kv), randn(*kv))
            for _ in range(timing.operand_sets(case.bytes_moved))
        ]
        q, k, v = (x[:1] for x in sets[0])
        ref = reference.attention(q, k, v)[0][0, 0]
        contiguous: dict[str, Decode] = {
            "astrai": attn_decode,
            "astrai-serial": serial(attn_decode),
            **{name: partial(sdpa_decode, backend) for name, backend in SDPA.items()},
        }
        for provider, decode in contiguous.items():
            yield decode_row(env, case, provider, [decode], sets, ref)
        for page in DECODE_PAGES:
            case = DecodeCase(*shape, page)
            pool = (-1, page, kv_heads, head_dim)
            paged = [(q, k.view(pool), v.view(pool)) for q, k, v in sets]
            table = torch.randperm(batch * kv_len // page, device="cuda", dtype=torch.int32)
            table = table.view(batch, -1)
            lengths = torch.full((batch,), kv_len, device="cuda", dtype=torch.int32)
            k, v = (x[table[0].long()].flatten(0, 1)[None] for x in paged[0][1:])
            ref = reference.attention(q, k, v)[0][0, 0]
            decode = partial(paged_decode, table=table, lengths=lengths)
            over_pages: dict[str, list[Decode]] = {
                "astrai": [decode],
                "astrai-serial": [serial(decode)],
                "astrai-static": [partial(decode, static=True)] if page == PAGE_SIZE else [],
                "flashinfer": flashinfer_peer.decodes(case, table),
            }
            if batch == 1 and page == PAGE_SIZE and kv_len < CAPACITY:
                # Ids past a sequence's pages may be anything.
                wide = F.pad(table, (0, (CAPACITY - kv_len) // page), value=2**31 - 1)
                over_capacity = partial(paged_decode, table=wide, lengths=lengths)
                over_pages[f"astrai-capacity{CAPACITY}"] = [over_capacity]
            for provider, decodes in over_pages.items():
                if decodes:
                    yield decode_row(env, case, provider, decodes, paged, ref)


# Queries, of the heads of one KV head, whose float64 reference is compared.
PREFILL_CHECKED = 256

Call = Callable[[], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)


def in_pages(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same tokens in pools whose pages lie in any order, and the ids ``[batch, pages]``."""
    batch, seq = k.shape[:2]
    table = torch.randperm(batch * seq // PAGE_SIZE, device="cuda")
    pools = []
    for x in (k, v):
        pages = x.view(-1, PAGE_SIZE, *x.shape[2:])
        pools.append(torch.empty_like(pages))
        pools[-1][table] = pages
    return pools[0], pools[1], table.int().view(batch, -1)


def paged_call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """The same problem over pages."""
    batch, seq = q.shape[:2]
    *pools, table = in_pages(k, v)
    indptr, *maps = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in q_tile_schedule([seq] * batch)
    )
    run = partial(
        attn_paged_prefill,
        q.flatten(0, 1),
        *pools,
        table,
        indptr,
        indptr,
        *maps,
        page_size=PAGE_SIZE,
        is_causal=causal,
    )
    return lambda: run().view_as(q)


def flashinfer_call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    k_pool, v_pool, table = in_pages(k, v)
    return flashinfer_peer.prefill(q, k_pool, v_pool, table, causal)


def prefill_error(out: Tensor, operands: tuple[Tensor, Tensor, Tensor], causal: bool) -> float:
    q, k, v = operands
    group = q.shape[2] // k.shape[2]
    last = slice(-PREFILL_CHECKED, None)
    ref, _ = reference.attention(q[:1, last, :group], k[:1, :, :1], v[:1, :, :1], is_causal=causal)
    return max_error(out[:1, last, :group], ref)


def prefill_providers(case: PrefillCase) -> dict[str, Callable[..., Call]]:
    """From q, k and v to the call that is measured."""
    causal = case.causal
    peers: dict[str, Callable[..., Call]] = {}
    if flashinfer_peer.is_installed():
        peers["flashinfer"] = lambda q, k, v: flashinfer_call(q, k, v, causal)
    return peers | {
        "astrai": lambda q, k, v: partial(attn_prefill, q, k, v, is_causal=causal),
        "astrai-paged16": lambda q, k, v: paged_call(q, k, v, causal),
        "flash": lambda q, k, v: partial(sdpa, q, k, v, causal, SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda q, k, v: partial(sdpa, q, k, v, causal, SDPBackend.CUDNN_ATTENTION),
    }


def bench_prefill(env: Environment) -> Iterator[Row]:
    for case in PREFILL_CASES:
        heads = (case.q_heads, case.kv_heads, case.kv_heads)
        sets = []
        for _ in range(timing.operand_sets(case.bytes_moved)):
            q, k, v = (randn(case.batch, case.seq, h, case.head_dim) for h in heads)
            sets.append((q, k, v))
        for provider, make in prefill_providers(case).items():
            calls = [make(*operands) for operands in sets]
            yield env.row(
                "attention",
                "attn_prefill",
                case.label,
                provider,
                timing.node_time_us(calls, nodes=timing.MIN_NODES),
                bytes_moved=case.bytes_moved,
                flops=case.flops,
                error=prefill_error(calls[0](), sets[0], case.causal),
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
    case = DecodeCase(1, 64, 32, 8, 128, PAGE_SIZE)
    q, pool = randn(1, 1, 32, 128), randn(4, PAGE_SIZE, 8, 128)
    table = torch.arange(4, device="cuda", dtype=torch.int32)[None]
    lengths = torch.full((1,), 64, device="cuda", dtype=torch.int32)
    decode = partial(paged_decode, q, pool, pool.clone(), table, lengths)
    label = f"attn_paged_decode,{case.label}"
    yield env.row("attention", "host", label, "astrai", timing.host_time_us(decode))


BENCHMARKS = {
    "decode": bench_decode,
    "prefill": bench_prefill,
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
                    f"{row.op:17} {row.case:42} {row.provider:14} {row.median_us:9.2f} us"
                    + ("" if row.tflops is None else f" {row.tflops:7.1f} TFLOP/s"),
                    flush=True,
                )
            merge(results_path(args.results, env.gpu, "attention"), rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
