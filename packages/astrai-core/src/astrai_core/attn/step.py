# SPDX-License-Identifier: Apache-2.0
"""One forward pass over sequences of a cache: where its new tokens go, and what it attends over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from astrai_core import discovery

from .schedule import q_tile_schedule

if TYPE_CHECKING:
    from .cache import PagedKVCache

__all__ = ["FAMILY", "Step"]

FAMILY = "attention"
"""The family whose kernels read a step."""

T = TypeVar("T")

# Each table starts on 16 bytes, for kernels that read vectors.
_ALIGN = 4


class _lazy(Generic[T]):  # noqa: N801 (a decorator)
    """`functools.cached_property` without the lock that it has before 3.12, for torch.compile."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, step: Any, _: type) -> T:
        value = self._compute(step)
        setattr(step, self._name, value)
        return value


class Step:
    """What `PagedKVCache.begin_step` returns, and `attention` takes as ``kv_cache``.

    All layers of a pass share it: the positions of the new tokens are the same in each. It is
    current until one of its sequences is changed by anything else: another step, `reserve`,
    `truncate`, `fork` or `free`. What reads or writes an outdated one's pages raises RuntimeError,
    since they may be another sequence's by then.

    Tensors are int32, on the cache's device. Queries are packed one sequence after the other.

    Attributes:
        seqs: the sequences, in order.
        q_lens: new tokens of each.
        kv_lens: all tokens of each, the new ones included.
        total_q: new tokens of all sequences.
        max_q_len: the most new tokens of a sequence.
        max_kv_len: the most tokens of a sequence.
        page_size: tokens of a page.
        page_table: ``[B, max_pages]``: pages of each sequence; 0 where it has no more.
        seq_lens: ``[B]``: `kv_lens`.
        qo_indptr: ``[B + 1]``: where each sequence's queries begin.
        kv_indptr: ``[B + 1]``: the same for its keys.
        q_tile_to_batch: sequence of each tile of queries, of as many rows as the attention family's
            manifest names; empty without one.
        q_tile_to_index: position of each tile within its sequence; likewise.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        seqs: Sequence[int],
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        rows: Sequence[Tensor],
    ) -> None:
        """`rows` are the pages of each sequence, int32 on the host."""
        self._cache = cache
        self._ended = ""
        self.seqs = tuple(seqs)
        self.q_lens = tuple(q_lens)
        self.kv_lens = tuple(kv_lens)
        self.total_q = sum(q_lens)
        self.max_q_len = max(q_lens)
        self.max_kv_len = max(kv_lens)
        self.page_size = cache.page_size
        self._leading: list[tuple[int, ...]] = [(1, self.total_q), (self.total_q,)]
        if self.uniform:
            self._leading.insert(0, (len(self.seqs), self.max_q_len))
        table = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int32)
        for index, row in enumerate(rows):
            table[index, : len(row)] = row
        # Another number would let the kernel read the wrong rows, and nothing would notice.
        tile_rows = discovery.find(FAMILY).q_tile_rows
        tiles = ([], []) if tile_rows is None else q_tile_schedule(q_lens, tile_rows)[1:]
        lists = (kv_lens, [0, *accumulate(q_lens)], [0, *accumulate(kv_lens)], *tiles)
        tensors = [table, *(torch.tensor(values, dtype=torch.int32) for values in lists)]
        (
            self.page_table,
            self.seq_lens,
            self.qo_indptr,
            self.kv_indptr,
            self.q_tile_to_batch,
            self.q_tile_to_index,
        ) = _to_device(tensors, cache.device)

    @property
    def num_layers(self) -> int:
        """Layers of the cache."""
        return self._cache.num_layers

    @property
    def uniform(self) -> bool:
        """Whether all sequences have equally many new tokens."""
        return self.total_q == self.max_q_len * len(self.seqs)

    @_lazy
    def batch_of(self) -> Tensor:
        """``[total_q]``, int64: the sequence of each new token."""
        batch = torch.arange(len(self.seqs), device=self.page_table.device)
        # With the size known on the host the device is not waited for.
        return batch.repeat_interleave(self.qo_indptr.diff(), output_size=self.total_q)

    @_lazy
    def query_of(self) -> Tensor:
        """``[total_q]``, int64: the position of each new token among those of its sequence."""
        row = torch.arange(self.total_q, device=self.page_table.device)
        return row - self.qo_indptr[self.batch_of]

    @_lazy
    def positions(self) -> Tensor:
        """``[total_q]``, int64: the position of each new token in its sequence."""
        return self.query_of + (self.seq_lens - self.qo_indptr.diff())[self.batch_of]

    @_lazy
    def _new_slots(self) -> tuple[Tensor, Tensor]:
        """Page, and offset in it, of each new token."""
        return self._slots(self.batch_of, self.positions)

    @_lazy
    def _flat_slots(self) -> tuple[Tensor, Tensor]:
        """Page and offset of every token, one sequence after the other."""
        total = sum(self.kv_lens)
        batch = torch.arange(len(self.seqs), device=self.page_table.device)
        batch = batch.repeat_interleave(self.seq_lens, output_size=total)
        position = torch.arange(total, device=batch.device) - self.kv_indptr[batch]
        return self._slots(batch, position)

    @_lazy
    def _padded_slots(self) -> tuple[Tensor, Tensor]:
        """Page and offset of every token, ``[B, max_kv_len]``; for padding, of the last one."""
        position = torch.arange(self.max_kv_len, device=self.page_table.device)
        position = torch.minimum(position, self.seq_lens[:, None] - 1)
        batch = torch.arange(len(self.seqs), device=position.device)[:, None]
        return self._slots(batch, position)

    def _slots(self, batch: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        page = self.page_table[batch, position // self.page_size]
        return page.long(), position % self.page_size

    def check(self, layer_id: int, k: Tensor, v: Tensor) -> None:
        """Raises if `write` would.

        Raises:
            RuntimeError: the step is outdated, or k or v requires grad.
            IndexError: there is no such layer.
            ValueError: a shape that is not that of this step's tokens, or another dtype or device
                than the cache's.
        """
        self._check_current()
        pool, _ = self._cache.pools(layer_id)
        for name, x in (("k", k), ("v", v)):
            self._check_tokens(name, x)
            if x.shape[-2:] != pool.shape[-2:]:
                expected, found = [*pool.shape[-2:]], [*x.shape[-2:]]
                raise ValueError(f"{name}: expected [kv_heads, head_dim] {expected}, got {found}")
            if x.dtype != pool.dtype or x.device != pool.device:
                raise ValueError(
                    f"{name}: expected {pool.dtype} on {pool.device} as the cache has it, got "
                    f"{x.dtype} on {x.device}"
                )
            if torch.is_grad_enabled() and x.requires_grad:
                raise RuntimeError(
                    f"{name} requires grad, and a cache keeps no graph: use torch.no_grad()"
                )

    def packed(self, name: str, x: Tensor) -> Tensor:
        """``[total_q, heads, head_dim]`` of a tensor that has this step's tokens.

        Args:
            name: name of the tensor, for the error.
            x: ``[B, L, heads, head_dim]`` where every sequence has L new tokens, or
                ``[1, total_q, heads, head_dim]``, or packed already.

        Raises:
            ValueError: another shape.
        """
        self._check_tokens(name, x)
        return x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])

    def pools(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of all pages of a layer, ``[pages, page_size, kv_heads, head_dim]``; views."""
        self._check_current()
        return self._cache.pools(layer_id)

    def write(self, layer_id: int, k: Tensor, v: Tensor) -> None:
        """Stores the keys and values of this step's tokens in a layer; does not synchronise.

        Args:
            layer_id: the layer.
            k: as `packed` takes it.
            v: like k.

        Raises:
            Exception: what `check` raises.
        """
        self.check(layer_id, k, v)
        k_pool, v_pool = self._cache.pools(layer_id)
        k_pool.index_put_(self._new_slots, self.packed("k", k))
        v_pool.index_put_(self._new_slots, self.packed("v", v))

    def gather(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of all tokens, ``[sum(kv_lens), kv_heads, head_dim]``, split at `kv_indptr`.

        They are copies, without anything that was not written. Does not synchronise.
        """
        k, v = self.pools(layer_id)
        return k[self._flat_slots], v[self._flat_slots]

    def gather_padded(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of all tokens, ``[B, max_kv_len, kv_heads, head_dim]``.

        Past a sequence's end stands its last token: to be masked, but no garbage. Copies. Does not
        synchronise.
        """
        k, v = self.pools(layer_id)
        return k[self._padded_slots], v[self._padded_slots]

    def end(self, why: str) -> None:
        """Makes the step outdated; for the cache, when it changes one of the sequences."""
        self._ended = self._ended or why

    def _check_current(self) -> None:
        if self._ended:
            raise RuntimeError(f"the step is outdated: {self._ended}")

    def _check_tokens(self, name: str, x: Tensor) -> None:
        if x.shape[:-2] not in self._leading:
            expected = " or ".join(
                f"[{', '.join(map(str, leading))}, heads, head_dim]" for leading in self._leading
            )
            raise ValueError(f"{name}: expected {expected}, got {[*x.shape]}")


def _to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The int32 tensors on a device, by one transfer that the host does not wait for."""
    starts = [0, *accumulate(-(-t.numel() // _ALIGN) * _ALIGN for t in tensors)]
    # Pageable memory would be copied while the host waits.
    host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=False):
        host[start : start + tensor.numel()] = tensor.flatten()
    moved = host.to(device, non_blocking=True)
    return [
        moved[start : start + tensor.numel()].view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]
