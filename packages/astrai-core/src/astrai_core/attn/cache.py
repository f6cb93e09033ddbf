# SPDX-License-Identifier: Apache-2.0
"""A KV cache in pages, which sequences with a common beginning share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .step import Step

__all__ = ["OutOfPagesError", "PagedKVCache"]

MAX_PAGE_SIZE = 256


class OutOfPagesError(RuntimeError):
    """There are fewer free pages than a request needs; nothing was changed.

    Attributes:
        needed: pages that the request needs.
        free: pages that are free.
    """

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"{needed} pages are needed, {free} of {total} are free; free() a sequence, or make a "
            "cache of more pages"
        )
        self.needed = needed
        self.free = free


@dataclass(eq=False)
class _Sequence:
    id: int
    length: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    step: Step | None = None

    def end_step(self, why: str) -> None:
        if self.step is not None:
            self.step.end(f"{why} of sequence {self.id}")
            self.step = None


@dataclass(frozen=True)
class _Growth:
    """What a sequence needs for more tokens: a copy of its last page, and further pages."""

    sequence: _Sequence
    length: int
    copy: int | None  # the page that takes the place of the shared one at `at`
    at: int
    fresh: list[int]

    def row(self, pages: int) -> Tensor:
        """The first pages of the sequence after it has grown."""
        row = torch.empty(len(self.sequence.pages) + len(self.fresh), dtype=torch.int32)
        kept = len(self.sequence.pages)
        if kept:
            row[:kept] = torch.frombuffer(self.sequence.pages, dtype=torch.int32)
        if self.fresh:
            row[kept:] = torch.tensor(self.fresh, dtype=torch.int32)
        if self.copy is not None:
            row[self.at] = self.copy
        return row[:pages]


class PagedKVCache:
    """Keys and values of all layers, in pages of a fixed number of tokens.

    A sequence is a number from `new_sequence`. It has a length and a list of pages, the same in
    every layer. A forward pass goes as follows; lengths grow once, in `begin_step`::

        step = cache.begin_step([a, b], [5, 1])  # 5 new tokens for a, 1 for b
        for layer in range(num_layers):
            y = attention(q, k, v, step, layer, is_causal=True)  # writes k and v, reads all

    A pass that fails leaves the new tokens unwritten: take them back with `truncate`.

    All bookkeeping is on the host, and no method waits for the device. Not thread-safe.

    Args:
        num_layers: layers.
        num_pages: pages; each holds `page_size` tokens of all layers.
        page_size: tokens of a page: a power of two up to 256.
        num_kv_heads: heads of keys and values.
        head_dim: elements of a head.
        dtype: of keys and values.
        device: where they are.
        layout: order of a page in memory: ``NHD`` is ``[page_size, kv_heads, head_dim]``, ``HND``
            ``[kv_heads, page_size, head_dim]``. Views are NHD in either.

    Raises:
        ValueError: a size or a layout that is none.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int,
        layout: Literal["NHD", "HND"] = "NHD",
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
            raise ValueError(
                f"page_size: expected a power of two up to {MAX_PAGE_SIZE}, got {page_size}"
            )
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: expected NHD or HND, got {layout!r}")
        tokens, heads = page_size, num_kv_heads
        page = (tokens, heads) if layout == "NHD" else (heads, tokens)
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False):
            self._storage = torch.empty(
                (num_layers, 2, num_pages, *page, head_dim), dtype=dtype, device=device
            )
            nhd = self._storage if layout == "NHD" else self._storage.transpose(3, 4)
            self._pools = [(nhd[layer, 0], nhd[layer, 1]) for layer in range(num_layers)]
        self.layout = layout
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_layers = num_layers
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._owners = [0] * num_pages
        self._free = [*reversed(range(num_pages))]

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self._storage.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._storage.dtype

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that there are."""
        return tuple(self._sequences)

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._get(seq).length

    def pages(self, seq: int) -> tuple[int, ...]:
        """Pages of a sequence, reserved ones included."""
        return tuple(self._get(seq).pages)

    def pools(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of all pages of a layer, ``[pages, page_size, kv_heads, head_dim]``; views.

        Raises:
            IndexError: there is no such layer.
        """
        if not 0 <= layer_id < self.num_layers:
            raise IndexError(f"layer_id: expected 0 to {self.num_layers - 1}, got {layer_id}")
        return self._pools[layer_id]

    def new_sequence(self) -> int:
        """Begins a sequence, without tokens or pages."""
        seq = self._next_id
        self._next_id += 1
        self._sequences[seq] = _Sequence(seq)
        return seq

    def reserve(self, seq: int, tokens: int) -> None:
        """Gives a sequence the pages for that many tokens more, before they come.

        A later `begin_step` of them needs no page then, unless a `fork` comes between.

        Raises:
            OutOfPagesError: there are not enough pages; nothing was changed.
            ValueError: the sequence is unknown, or tokens is negative.
        """
        if tokens < 0:
            raise ValueError(f"tokens: expected at least 0, got {tokens}")
        growths = self._grow([(self._get(seq), tokens)])
        self._copy_pages(growths)
        self._commit(growths, "reserve()")

    def begin_step(self, seqs: Sequence[int], new_tokens: int | Sequence[int]) -> Step:
        """Lengthens sequences by new tokens, for a pass that writes them in every layer.

        A last page that another sequence has too, and that the tokens go into, is copied first.

        Args:
            seqs: different sequences, at least one.
            new_tokens: new tokens of each, at least one; a number holds for all.

        Raises:
            OutOfPagesError: there are not enough pages; nothing was changed.
            ValueError: sequences or numbers of tokens that are none.
        """
        counts = [new_tokens] * len(seqs) if isinstance(new_tokens, int) else [*new_tokens]
        if not seqs or len(set(seqs)) != len(seqs):
            raise ValueError(f"seqs: expected different sequences, at least one, got {[*seqs]}")
        if len(counts) != len(seqs) or min(counts) < 1:
            raise ValueError(
                f"new_tokens: expected {len(seqs)} numbers of at least 1, got {counts}"
            )
        growths = self._grow([(self._get(s), n) for s, n in zip(seqs, counts, strict=True)])
        kv_lens = [growth.length for growth in growths]
        rows = [growth.row(self._pages_for(growth.length)) for growth in growths]
        step = Step(self, seqs, counts, kv_lens, rows)
        self._copy_pages(growths)
        # Nothing fails from here on.
        self._commit(growths, "begin_step()")
        for growth in growths:
            growth.sequence.length = growth.length
            growth.sequence.step = step
        return step

    def fork(self, seq: int) -> int:
        """Begins a sequence with the tokens of another, whose pages both have from now on.

        Whichever of them first adds a token to a page that is filled in part gets a copy of it.
        Call it between passes: the tokens of an unfinished one would be shared unwritten.
        """
        source = self._get(seq)
        source.end_step("fork()")
        new = self._sequences[self.new_sequence()]
        new.length = source.length
        new.pages = source.pages[: self._pages_for(source.length)]
        for page in new.pages:
            self._owners[page] += 1
        return new.id

    def truncate(self, seq: int, length: int) -> None:
        """Takes back the tokens of a sequence from position `length` on, and its spare pages.

        Raises:
            ValueError: the sequence is unknown, or is not that long.
        """
        sequence = self._get(seq)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"length: expected 0 to {sequence.length}, got {length}")
        sequence.end_step("truncate()")
        keep = self._pages_for(length)
        self._release(sequence.pages[keep:])
        del sequence.pages[keep:]
        sequence.length = length

    def free(self, seq: int) -> None:
        """Ends a sequence; pages that no other one has are free again.

        Raises:
            ValueError: the sequence is unknown.
        """
        sequence = self._get(seq)
        sequence.end_step("free()")
        self._release(sequence.pages)
        del self._sequences[seq]

    def gather(self, layer_id: int, seq: int) -> tuple[Tensor, Tensor]:
        """K and V of all tokens of a sequence, ``[length, kv_heads, head_dim]``; copies."""
        sequence = self._get(seq)
        used = [*sequence.pages[: self._pages_for(sequence.length)]]
        pages = torch.tensor(used, dtype=torch.long)
        if self.device.type == "cuda":
            pages = pages.pin_memory().to(self.device, non_blocking=True)
        k, v = self.pools(layer_id)
        length = sequence.length
        return k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]

    def _get(self, seq: int) -> _Sequence:
        try:
            return self._sequences[seq]
        except KeyError:
            raise ValueError(f"sequence {seq} is unknown: never begun, or freed") from None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _grow(self, wanted: Iterable[tuple[_Sequence, int]]) -> list[_Growth]:
        """Picks the pages for more tokens, without taking them."""
        growths: list[_Growth] = []
        available = reversed(self._free)
        left: dict[int, int] = {}  # owners that gave a page up for a copy of it
        needed = 0
        for sequence, tokens in wanted:
            length = sequence.length + tokens
            at, offset = divmod(sequence.length, self.page_size)
            shared = False
            if tokens and offset:
                page = sequence.pages[at]
                shared = self._owners[page] - left.get(page, 0) > 1
                left[page] = left.get(page, 0) + shared
            fresh = max(0, self._pages_for(length) - len(sequence.pages))
            needed += shared + fresh
            if needed <= len(self._free):
                copy = next(available) if shared else None
                pages = [next(available) for _ in range(fresh)]
                growths.append(_Growth(sequence, length, copy, at, pages))
        if needed > len(self._free):
            raise OutOfPagesError(needed, len(self._free), self.num_pages)
        return growths

    def _copy_pages(self, growths: Iterable[_Growth]) -> None:
        for growth in growths:
            if growth.copy is not None:
                shared = growth.sequence.pages[growth.at]
                self._storage[:, :, growth.copy].copy_(self._storage[:, :, shared])

    def _commit(self, growths: Iterable[_Growth], why: str) -> None:
        """Takes the pages that `_grow` picked, in the same order."""
        for growth in growths:
            sequence = growth.sequence
            sequence.end_step(why)
            taken = growth.fresh if growth.copy is None else [growth.copy, *growth.fresh]
            if taken:
                del self._free[-len(taken) :]
            for page in taken:
                self._owners[page] = 1
            if growth.copy is not None:
                self._release([sequence.pages[growth.at]])
                sequence.pages[growth.at] = growth.copy
            sequence.pages.extend(growth.fresh)

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
