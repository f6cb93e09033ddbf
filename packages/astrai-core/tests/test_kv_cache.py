# SPDX-License-Identifier: Apache-2.0
"""The paged cache against plain lists, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from astrai_core import OutOfPagesError, PagedKVCache
from astrai_core.attn import Step, q_tile_schedule
from conftest import Site, install_attention

LAYERS, HEADS, DIM = 2, 2, 4
PAGES = 10


def make(pages: int = PAGES, page_size: int = 4, **changes: Any) -> PagedKVCache:
    """A cache on the CPU whose pages are NaN until they are written."""
    options = {"dtype": torch.float32, "device": "cpu", **changes}
    cache = PagedKVCache(LAYERS, pages, page_size, HEADS, DIM, **options)
    for layer in range(LAYERS):
        for pool in cache.pools(layer):
            pool.fill_(torch.nan)
    return cache


def values(tokens: list[int], layer: int) -> Tensor:
    """K of tokens, another for each token, layer, head and element; V is the negative."""
    inner = torch.arange(HEADS * DIM).view(HEADS, DIM) / 64
    return torch.tensor(tokens, dtype=torch.float32)[:, None, None] * LAYERS + layer + inner


def write(step: Step, tokens: list[int]) -> None:
    for layer in range(LAYERS):
        k = values(tokens, layer)[None]
        step.write(layer, k, -k)


def assert_holds(cache: PagedKVCache, seq: int, tokens: list[int]) -> None:
    assert cache.length(seq) == len(tokens)
    for layer in range(LAYERS):
        k, v = cache.gather(layer, seq)
        assert torch.equal(k, values(tokens, layer))
        assert torch.equal(v, -values(tokens, layer))


class Machine(RuleBasedStateMachine):
    """Sequences as lists of tokens, each of which is written once and never again."""

    @initialize(page_size=st.sampled_from([1, 2, 4, 8]), layout=st.sampled_from(["NHD", "HND"]))
    def begin(self, page_size: int, layout: Any) -> None:
        self.cache = make(page_size=page_size, layout=layout)
        self.model: dict[int, list[int]] = {}
        self.written = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    def state(self) -> dict[int, tuple[Any, ...]]:
        return {s: (self.cache.length(s), self.cache.pages(s)) for s in self.cache.sequences}

    def needed(self, wanted: dict[int, int]) -> int:
        """Pages that a request needs: further ones, and copies, of which one owner needs none."""
        size = self.cache.page_size
        owners = Counter(p for s in self.model for p in self.cache.pages(s))
        further, writers = 0, Counter[int]()
        for seq, count in wanted.items():
            length, pages = len(self.model[seq]), self.cache.pages(seq)
            further += max(0, -(-(length + count) // size) - len(pages))
            if count and length % size:
                writers[pages[length // size]] += 1
        return further + sum(min(n, owners[page] - 1) for page, n in writers.items())

    def attempt(self, wanted: dict[int, int], call: Callable[[], Any]) -> Any:
        """The result of a call that needs pages; None where it failed, as it then must."""
        needed, free, before = self.needed(wanted), self.cache.num_free_pages, self.state()
        if needed > free:
            with pytest.raises(OutOfPagesError) as caught:
                call()
            assert (caught.value.needed, caught.value.free) == (needed, free)
            assert self.state() == before and self.cache.num_free_pages == free
            return None
        result = call()
        assert self.cache.num_free_pages == free - needed >= 0
        return result or True

    @precondition(lambda self: len(self.model) < 6)
    @rule()
    def new_sequence(self) -> None:
        seq = self.cache.new_sequence()
        assert seq not in self.model
        self.model[seq] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        some = st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=4, unique=True)
        seqs = data.draw(some)
        counts = [data.draw(st.integers(1, 9)) for _ in seqs]
        step = self.attempt(
            dict(zip(seqs, counts, strict=True)), lambda: self.cache.begin_step(seqs, counts)
        )
        if step is None:
            return
        tokens = [*range(self.written, self.written + sum(counts))]
        self.written += len(tokens)
        write(step, tokens)
        rest = iter(tokens)
        for seq, count in zip(seqs, counts, strict=True):
            self.model[seq] += [next(rest) for _ in range(count)]
        assert step.kv_lens == tuple(len(self.model[s]) for s in seqs)
        for layer in range(LAYERS):
            flat = step.gather(layer)[0]
            assert torch.equal(flat, values([t for s in seqs for t in self.model[s]], layer))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        seq = self.pick(data)
        if self.attempt({seq: tokens}, lambda: self.cache.reserve(seq, tokens)):
            assert self.needed({seq: tokens}) == 0

    @precondition(lambda self: 0 < len(self.model) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq, free = self.pick(data), self.cache.num_free_pages
        child = self.cache.fork(seq)
        assert child not in self.model and self.cache.num_free_pages == free
        self.model[child] = [*self.model[seq]]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        length = data.draw(st.integers(0, len(self.model[seq])))
        self.cache.truncate(seq, length)
        del self.model[seq][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.cache.free(seq)
        del self.model[seq]

    @invariant()
    def no_page_is_lost_or_twice_in_use(self) -> None:
        assert {*self.cache.sequences} == self.model.keys()
        used = set()
        for seq, tokens in self.model.items():
            pages = self.cache.pages(seq)
            assert len({*pages}) == len(pages) >= -(-len(tokens) // self.cache.page_size)
            used |= {*pages}
        assert used <= {*range(PAGES)}
        assert len(used) + self.cache.num_free_pages == PAGES

    @invariant()
    def every_sequence_holds_its_tokens(self) -> None:
        for seq, tokens in self.model.items():
            assert_holds(self.cache, seq, tokens)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_tables_of_a_step(site: Site) -> None:
    install_attention(site)
    cache = make(64, 4)
    a, b, c = (cache.new_sequence() for _ in range(3))
    cache.begin_step([b], 6)
    step = cache.begin_step([a, b, c], [70, 1, 3])
    assert (step.seqs, step.q_lens, step.kv_lens) == ((a, b, c), (70, 1, 3), (70, 7, 3))
    assert (step.total_q, step.max_q_len, step.max_kv_len) == (74, 70, 70)
    for row, seq, used in zip(step.page_table.tolist(), (a, b, c), (18, 2, 1), strict=True):
        assert row == [*cache.pages(seq)[:used], *[0] * (18 - used)]
    indptr, to_batch, to_index = q_tile_schedule([70, 1, 3], 64)
    for tensor, expected in (
        (step.seq_lens, [70, 7, 3]),
        (step.qo_indptr, indptr),
        (step.kv_indptr, [0, 70, 77, 80]),
        (step.q_tile_to_batch, to_batch),
        (step.q_tile_to_index, to_index),
    ):
        assert tensor.dtype == torch.int32 and tensor.tolist() == expected
        assert tensor.data_ptr() % 16 == step.page_table.data_ptr() % 16
    assert step.positions.tolist() == [*range(70), 6, 0, 1, 2]
    assert step.batch_of.tolist() == [0] * 70 + [1] + [2] * 3


def test_lengths_grow_once_in_a_step_of_many_layers() -> None:
    cache = make()
    seq = cache.new_sequence()
    step = cache.begin_step([seq], 5)
    write(step, [0, 1, 2, 3, 4])
    write(step, [5, 6, 7, 8, 9])
    assert_holds(cache, seq, [5, 6, 7, 8, 9])


def test_a_fork_shares_full_pages_and_copies_the_last_one() -> None:
    cache = make()
    seq = cache.new_sequence()
    write(cache.begin_step([seq], 6), [*range(6)])
    child = cache.fork(seq)
    assert cache.pages(child) == cache.pages(seq) and cache.num_free_pages == PAGES - 2
    write(cache.begin_step([seq, child], 1), [10, 20])
    assert cache.pages(child)[0] == cache.pages(seq)[0]
    assert cache.pages(child)[1] != cache.pages(seq)[1]
    assert cache.num_free_pages == PAGES - 3
    assert_holds(cache, seq, [*range(6), 10])
    assert_holds(cache, child, [*range(6), 20])
    cache.free(seq)
    assert cache.num_free_pages == PAGES - 2
    assert_holds(cache, child, [*range(6), 20])


def test_a_full_last_page_is_shared_without_a_copy() -> None:
    cache = make()
    seq = cache.new_sequence()
    write(cache.begin_step([seq], 4), [*range(4)])
    child = cache.fork(seq)
    write(cache.begin_step([child], 1), [9])
    assert cache.pages(child)[:1] == cache.pages(seq) and cache.num_free_pages == PAGES - 2


def test_out_of_pages_names_both_numbers_and_changes_nothing() -> None:
    cache = make(3)
    a, b = cache.new_sequence(), cache.new_sequence()
    write(cache.begin_step([a], 6), [*range(6)])
    child = cache.fork(a)
    step = cache.begin_step([b], 1)
    # Two for b, and a copy of the last page for either of a and its child.
    with pytest.raises(OutOfPagesError, match=r"^3 pages are needed, 0 of 3 are free; ") as caught:
        cache.begin_step([b, a, child], [9, 1, 1])
    assert (caught.value.needed, caught.value.free) == (3, 0)
    assert isinstance(caught.value, RuntimeError)
    k = values([7], 0)[None]
    step.write(0, k, k)  # the step before it is as current as it was
    assert_holds(cache, a, [*range(6)])
    assert [cache.length(s) for s in (a, b, child)] == [6, 1, 6]


def test_reserved_pages_serve_later_steps_and_stay_with_their_sequence() -> None:
    cache = make(3)
    seq, other = cache.new_sequence(), cache.new_sequence()
    cache.reserve(seq, 9)
    assert cache.num_free_pages == 0 and cache.length(seq) == 0
    child = cache.fork(seq)
    assert cache.pages(child) == ()
    with pytest.raises(OutOfPagesError):
        cache.begin_step([other], 1)
    write(cache.begin_step([seq], 9), [*range(9)])
    assert_holds(cache, seq, [*range(9)])
    cache.truncate(seq, 4)
    assert cache.num_free_pages == 2


@pytest.mark.parametrize("change", ["begin_step", "reserve", "fork", "truncate", "free"])
def test_a_step_ends_when_one_of_its_sequences_changes(change: str) -> None:
    cache = make()
    seq, other, third = (cache.new_sequence() for _ in range(3))
    step = cache.begin_step([other, seq], 1)
    k = values([1, 2], 0)[None]
    cache.begin_step([third], 1)
    step.write(0, k, k)
    arguments: dict[str, tuple[Any, ...]] = {
        "begin_step": ([seq], 1),
        "reserve": (seq, 1),
        "truncate": (seq, 0),
    }
    getattr(cache, change)(*arguments.get(change, (seq,)))
    message = rf"^the step is outdated: {change}\(\) of sequence {seq}$"
    for use in (lambda: step.write(0, k, k), lambda: step.gather(0), lambda: step.pools(0)):
        with pytest.raises(RuntimeError, match=message):
            use()


def test_what_a_step_writes_has_to_fit() -> None:
    cache = make()
    seqs = [cache.new_sequence(), cache.new_sequence()]
    step = cache.begin_step(seqs, 3)
    k = torch.ones(2, 3, HEADS, DIM)
    shapes = r"expected \[2, 3, heads, head_dim\] or \[1, 6, heads, head_dim\] or \[6, heads"
    with pytest.raises(ValueError, match=f"^k: {shapes}"):
        step.write(0, k[:, :2], k)
    with pytest.raises(ValueError, match=f"^v: {shapes}"):
        step.write(0, k, k[:1])
    with pytest.raises(ValueError, match=r"^v: expected \[kv_heads, head_dim\] \[2, 4\], got"):
        step.write(0, k, k[:, :, :1])
    with pytest.raises(ValueError, match=r"^k: expected torch.float32 on cpu .* torch.float64 on"):
        step.write(0, k.double(), k)
    with pytest.raises(IndexError, match=r"^layer_id: expected 0 to 1, got 2"):
        step.write(2, k, k)
    with pytest.raises(IndexError, match=r"^layer_id: expected 0 to 1, got -1"):
        step.write(-1, k, k)
    with pytest.raises(RuntimeError, match=r"^v requires grad"):
        step.write(0, k, k.clone().requires_grad_())
    for seq in seqs:
        assert cache.gather(0, seq)[0].isnan().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 3}, "page_size: expected a power of two up to 256, got 3"),
        ({"page_size": 512}, "page_size: .* got 512"),
        ({"page_size": 0}, "page_size: .* got 0"),
        ({"layout": "nhd"}, "layout: expected NHD or HND, got 'nhd'"),
        ({"pages": 0}, "num_pages: expected at least 1, got 0"),
    ],
)
def test_a_cache_that_is_none(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        make(**changes)


def test_requests_that_are_none() -> None:
    cache = make()
    seq = cache.new_sequence()
    cache.begin_step([seq], 2)
    for seqs, new_tokens in (([], []), ([seq, seq], 1)):
        with pytest.raises(ValueError, match="seqs: expected different sequences, at least one"):
            cache.begin_step(seqs, new_tokens)
    for tokens in ([0], [1, 1], 0):
        with pytest.raises(ValueError, match="new_tokens: expected 1 numbers of at least 1, got"):
            cache.begin_step([seq], tokens)
    for length in (3, -1):
        with pytest.raises(ValueError, match=f"length: expected 0 to 2, got {length}"):
            cache.truncate(seq, length)
    with pytest.raises(ValueError, match="tokens: expected at least 0, got -1"):
        cache.reserve(seq, -1)
    cache.free(seq)
    for call in (cache.free, cache.fork, cache.length, cache.pages):
        with pytest.raises(ValueError, match=f"sequence {seq} is unknown: never begun, or freed"):
            call(seq)
    assert cache.num_free_pages == PAGES


def test_memory_of_a_page_is_as_the_layout_says() -> None:
    for layout, strides in (("NHD", (HEADS * DIM, DIM, 1)), ("HND", (DIM, 4 * DIM, 1))):
        pool, _ = make(layout=layout).pools(0)
        assert pool.shape == (PAGES, 4, HEADS, DIM)
        assert pool.stride() == (4 * HEADS * DIM, *strides)


def test_a_cache_of_inference_mode_serves_outside_of_it() -> None:
    with torch.inference_mode():
        cache = make()
        seq = cache.new_sequence()
        write(cache.begin_step([seq], 2), [0, 1])
        step = cache.begin_step([seq], 1)
    write(step, [2])
    assert_holds(cache, seq, [0, 1, 2])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_device() -> None:
    cache = make(device="cuda")
    seq = cache.new_sequence()
    tokens = [values([0, 1], layer)[None].cuda() for layer in range(LAYERS)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            cache.fork(seq)  # of whose last page a copy is made
            step = cache.begin_step([seq], 2)
            for layer, k in enumerate(tokens):
                step.write(layer, k, -k)
                found = step.gather(layer), step.gather_padded(layer), cache.gather(layer, seq)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for k, v in found:
        assert torch.equal(k.flatten(0, -3).cpu(), values([0, 1] * 3, 1)) and torch.equal(v, -k)
