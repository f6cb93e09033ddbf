# SPDX-License-Identifier: Apache-2.0
"""Attention of every backend against float64, dense and through the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import attention_standin as standin
import pytest
import torch
from torch import Tensor

from astrai_core import PagedKVCache, attention, attn_backend
from astrai_core.attn import Step, _sdpa, backends
from conftest import Site, install_attention

BACKENDS = ["torch_native", "cuda", "flash"]
HEADS, DIM = 4, 64
FORWARDS = {1: "decode", 4: "prefill"}


def exact(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Attention in blhd, one query and head at a time, in float64; mask [B, L, S]."""
    q, k, v = q.double(), k.double(), v.double()
    y = torch.zeros_like(q)
    past = k.shape[1] - q.shape[1]
    for b, i, h in product(*map(range, q.shape[:3])):
        end = max(past + i + 1, 0) if is_causal else k.shape[1]
        keys = [j for j in range(end) if mask is None or mask[b, i, j]]
        if keys:
            kv_head = h // (q.shape[2] // k.shape[2])
            scores = k[b, keys, kv_head] @ q[b, i, h] / q.shape[3] ** 0.5
            y[b, i, h] = scores.softmax(0) @ v[b, keys, kv_head]
    return y


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def operands(batch: int, q_len: int, kv_len: int, kv_heads: int = 2) -> tuple[Tensor, ...]:
    shapes = ((q_len, HEADS), (kv_len, kv_heads), (kv_len, kv_heads))
    return tuple(randn(batch, *s, DIM, seed=i) for i, s in enumerate(shapes))


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Values are around 1: bf16 rounds the result, and torch also P, by 2^-8."""
    tolerance = 2e-2 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=BACKENDS)
def backend(
    request: pytest.FixtureRequest,
    site: Site,
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Each backend, demanded; CPU tensors seem to be on a GPU that stand-ins serve."""
    install_attention(site)
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(backends, "flash_attn", lambda: (varlen, None))
    with attn_backend(request.param), torch.no_grad():
        yield request.param


def varlen(*operands: Tensor | int, causal: bool) -> Tensor:
    """The part of flash_attn_varlen_func's contract that is used."""
    q, k, v, cu_q, cu_k, max_q, max_k = operands
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    out = torch.full_like(q, torch.nan)
    for b in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        keep = standin.triangle(rows.stop - rows.start, keys.stop - keys.start, causal)
        out[rows] = standin.rows(q[rows], k[keys], v[keys], keep)
    return out


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (5, 5), (3, 9), (5, 2)])
def test_dense(q_len: int, kv_len: int, kv_heads: int, is_causal: bool) -> None:
    q, k, v = operands(2, q_len, kv_len, kv_heads)
    y = attention(q, k, v, is_causal=is_causal, fwd="decode" if q_len == 1 else "prefill")
    assert y.is_contiguous() and y.dtype == q.dtype
    assert_close(y, exact(q, k, v, is_causal=is_causal))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", ["torch_native", "cuda"], indirect=True)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("q_len", "shape"),
    [(n, shape) for n in (1, 4) for shape in ((2, 6), (2, n, 6), (2, 1, n, 6))],
)
def test_masks_and_rows_that_are_masked_everywhere(
    q_len: int, shape: tuple[int, ...], is_causal: bool
) -> None:
    q, k, v = operands(2, q_len, 6)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, ...] = False
    mask[1, ..., 0] = True
    y = attention(q, k, v, attn_mask=mask, is_causal=is_causal, fwd=FORWARDS[q_len])
    assert (y[0] == 0).all() and (y[1] != 0).any()
    by_query = mask[:, None] if mask.dim() == 2 else mask
    expected = exact(q, k, v, by_query.reshape(2, -1, 6).expand(2, q_len, 6), is_causal)
    assert_close(y, expected)


def test_gradients_are_exact_and_finite_where_all_is_masked() -> None:
    leaves = [x.double().requires_grad_() for x in operands(2, 3, 5)]
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0] = False

    def call(*leaves: Tensor) -> Tensor:
        return attention(*leaves, attn_mask=mask, is_causal=True)

    grads = torch.autograd.grad(call(*leaves).sum(), leaves)
    assert all((g[0] == 0).all() and g[1].isfinite().all() and (g[1] != 0).any() for g in grads)
    small = [x[..., :2].detach().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(call, small)


def test_rows_that_are_masked_everywhere_on_a_torch_that_has_nan_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def naive(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor, **_: Any) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~attn_mask, -torch.inf)
        return scores.softmax(-1) @ v

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", naive)
    leaves = [x.double().requires_grad_() for x in operands(2, 3, 2)]
    mask = torch.tensor([[False, True], [True, True]])
    y = attention(*leaves, attn_mask=mask, is_causal=True)
    assert (y[0, :2] == 0).all() and (y[1, 0] == 0).all()
    assert_close(y, exact(*leaves, mask[:, None].expand(2, 3, 2), True))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), leaves))


def make(page_size: int, layout: Any, dtype: torch.dtype = torch.bfloat16) -> PagedKVCache:
    cache = PagedKVCache(2, 64, page_size, 2, DIM, dtype=dtype, device="cpu", layout=layout)
    for layer in range(2):
        for pool in cache.pools(layer):
            pool.fill_(torch.nan)
    return cache


def run(step: Step, chunks: list[tuple[Tensor, ...]], layer: int, **options: Any) -> list[Tensor]:
    """Attention of each sequence's chunk of q, k and v, [length, heads, DIM]."""
    q, k, v = (torch.cat(parts)[None] for parts in zip(*chunks, strict=True))
    if step.uniform and len(step.seqs) > 1:
        q, k, v = (x.unflatten(1, (len(step.seqs), -1))[0] for x in (q, k, v))
    y = attention(q, k, v, step, layer, **options)
    assert y.shape == q.shape and y.is_contiguous()
    return [*y.reshape(-1, HEADS, DIM).split([*step.q_lens])]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_ragged_prefill_and_decode_equal_contiguous(
    page_size: int, layout: str, is_causal: bool
) -> None:
    """Three passes: prompts of other lengths, more of them mixed with a single token, a decode."""
    cache = make(page_size, layout)
    seqs = [cache.new_sequence() for _ in range(3)]
    lengths = [(5, 4, 1), (9, 1, 1), (1, 1, 1)]
    for layer in range(2):
        assert_cached_equals_contiguous(cache, seqs, lengths, layer, is_causal)
        for seq in seqs:
            cache.truncate(seq, 0)


def assert_cached_equals_contiguous(
    cache: PagedKVCache,
    seqs: list[int],
    lengths: list[tuple[int, ...]],
    layer: int,
    is_causal: bool,
) -> None:
    totals = [sum(part) for part in zip(*lengths, strict=True)]
    whole = [operands(1, total, total) for total in totals]
    done = [0] * len(seqs)
    for counts in lengths:
        step = cache.begin_step(seqs, counts)
        cuts = [slice(d, d + n) for d, n in zip(done, counts, strict=True)]
        chunks = [tuple(x[0, cut] for x in xs) for xs, cut in zip(whole, cuts, strict=True)]
        fwd = "decode" if max(counts) == 1 else "prefill"
        found = run(step, chunks, layer, is_causal=is_causal, fwd=fwd)
        for y, (q, k, v), cut in zip(found, whole, cuts, strict=True):
            expected = exact(q[:, cut], k[:, : cut.stop], v[:, : cut.stop], None, is_causal)
            assert_close(y, expected[0])
        done = [cut.stop for cut in cuts]


@pytest.mark.usefixtures("backend")
def test_equal_lengths_and_more_than_a_tile() -> None:
    cache = make(16, "NHD")
    seqs = [cache.new_sequence() for _ in range(2)]
    for lengths in ([(70, 70), (3, 3), (1, 1)], [(70, 3)]):
        assert_cached_equals_contiguous(cache, seqs, lengths, 1, True)
        for seq in seqs:
            cache.truncate(seq, 0)


@pytest.mark.parametrize("counts", [(2, 2), (4, 1)])
@pytest.mark.parametrize("mask_dims", [2, 3, 4])
def test_masks_over_a_cache(counts: tuple[int, int], mask_dims: int) -> None:
    cache = make(4, "NHD")
    seqs = [cache.new_sequence(), cache.new_sequence()]
    cache.begin_step(seqs, [2, 3]).write(0, *([randn(1, 5, 2, DIM)] * 2))
    step = cache.begin_step(seqs, counts)
    shape = {2: (2,), 3: (2, step.max_q_len), 4: (2, 1, step.max_q_len)}[mask_dims]
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(*shape, step.max_kv_len, generator=generator) < 0.6
    total = sum(counts)
    q, k, v = randn(1, total, HEADS, DIM), *(randn(1, total, 2, DIM, seed=i) for i in (1, 2))
    y = attention(q, k, v, step, attn_mask=mask, is_causal=True)
    start = 0
    for index, (count, kv_len) in enumerate(zip(counts, step.kv_lens, strict=True)):
        rows = slice(start, start + count)
        start += count
        keys, values = cache.gather(0, seqs[index])
        keep = mask[index].reshape(-1, step.max_kv_len)[:count, :kv_len].expand(count, kv_len)
        expected = exact(q[:, rows], keys[None], values[None], keep[None], True)
        assert_close(y[:, rows], expected)


def test_a_fork_attends_over_what_it_shares() -> None:
    cache = make(4, "HND", torch.float32)
    q, k, v = (x.float() for x in operands(1, 7, 7))
    seq = cache.new_sequence()
    attention(q[:, :6], k[:, :6], v[:, :6], cache.begin_step([seq], 6), 0, is_causal=True)
    child = cache.fork(seq)
    for other in (child, seq):
        step = cache.begin_step([other], 1)
        y = attention(q[:, 6:], k[:, 6:], v[:, 6:], step, 0, fwd="decode")
        assert_close(y, exact(q[:, 6:], k, v))


def test_a_trace_holds_the_call() -> None:
    q, k, v = (x.float() for x in operands(2, 4, 4))
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, is_causal=True), attention(q, k, v, is_causal=True))


def test_a_trace_holds_a_pass_over_a_cache() -> None:
    cache = make(4, "NHD", torch.float32)
    seqs = [cache.new_sequence(), cache.new_sequence()]
    q, k, v = (randn(2, 3, heads, DIM, dtype=torch.float32) for heads in (HEADS, 2, 2))
    step = cache.begin_step(seqs, 3)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert_close(compiled(q, k, v, step, 1, is_causal=True), exact(q, k, v, None, True))
    # What the trace has computed of the step serves the next layer too.
    assert torch.equal(step.gather(1)[0], k.flatten(0, 1))
    assert_close(attention(q, k, v, step, 0, is_causal=True), exact(q, k, v, None, True))


class OnGpu(Tensor):
    """A CPU tensor that says it is a GPU's."""

    is_cuda = True


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("q_len", [1, 2])
def test_decode_by_torch_leaves_out_cudnn(
    enabled: bool, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def sdpa(q: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        q, k, v = (x.as_subclass(OnGpu) for x in operands(1, q_len, 3, HEADS))
        attention(q, k, v)
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert seen == [enabled and q_len > 1]


def test_cudnn_comes_back_after_the_last_of_several_threads() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        first, second = threading.Barrier(2), threading.Barrier(2)

        def late() -> None:
            with _sdpa._without_cudnn:
                first.wait()
                second.wait()

        thread = threading.Thread(target=late)
        with _sdpa._without_cudnn:
            thread.start()
            first.wait()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        second.wait()
        thread.join()
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_operands_may_begin_anywhere(backend: Any) -> None:
    """A contiguous slice off 16 bytes, dense and with a cache; the stand-in asserts its start."""
    del backend
    q, k, v = (
        torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in operands(2, 1, 1)
    )
    assert all(x.is_contiguous() and x.data_ptr() % 16 for x in (q, k, v))
    assert_close(attention(q, k, v, fwd="decode"), exact(q, k, v))
    cache = PagedKVCache(1, 8, 4, 2, DIM, device="cpu")
    step = cache.begin_step([cache.new_sequence(), cache.new_sequence()], 1)
    assert_close(attention(q, k, v, step), exact(q, k, v))
