# SPDX-License-Identifier: Apache-2.0
"""`build_model`, `decode_step`, `teardown`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from astrai_core import recording

from ._arguments import Problem
from ._composed import ComposedDecoder
from ._select import COMPOSED, MEGAKERNEL, Selection, select
from ._torch import TorchDecoder

__all__ = ["Handle", "build_model", "decode_step", "teardown"]


class Decoder(Protocol):
    """An implementation, built for a `Problem`."""

    def step(self, token_ids: Tensor, pos: int | Tensor) -> Tensor:
        """`decode_step`, for arguments that it has checked."""

    def close(self) -> None:
        """Gives back what it holds."""


class Handle:
    """What `build_model` returns: opaque, but for what decodes and why.

    Attributes:
        implementation: ``torch``, ``composed`` or ``megakernel``.
        passed_over: why the others do not decode.
    """

    def __init__(self, problem: Problem, selection: Selection, decoder: Decoder) -> None:
        self.implementation = selection.chosen
        self._decoder: Decoder | None = decoder
        self._batch = problem.cache.batch
        self._max_seq_len = problem.max_seq_len
        self._device = problem.device
        self._dtype = str(problem.config.dtype).removeprefix("torch.")
        self.passed_over = selection.passed_over
        c = problem.config
        self._record(
            f"build_model: {c.layers} layers of {c.d}, {self._batch} sequences up to "
            f"{self._max_seq_len} tokens"
        )

    def step(self, token_ids: Tensor, pos: int | Tensor) -> Tensor:
        """`decode_step`."""
        if self._decoder is None:
            raise RuntimeError("handle: expected one in use, got one after teardown()")
        _check("token_ids", token_ids, [(self._batch,)], self._device)
        if isinstance(pos, Tensor):
            _check("pos", pos, [(), (self._batch,)], self._device)
        elif type(pos) is not int:
            raise TypeError(f"pos: expected an int or a tensor, got {type(pos).__name__}")
        elif not 0 <= pos < self._max_seq_len:
            raise ValueError(f"pos: expected 0 to {self._max_seq_len - 1}, got {pos}")
        self._record(f"decode_step: token_ids [{self._batch}]")
        return self._decoder.step(token_ids, pos)

    def close(self) -> None:
        """`teardown`."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()

    def _record(self, what: str) -> None:
        if reports := recording.active():
            recording.record(
                reports,
                "decode",
                what,
                self._dtype,
                str(self._device),
                self.implementation,
                self.passed_over,
            )


class _Megakernel:
    """The package's own handle."""

    def __init__(self, package: Any, *arguments: Any) -> None:
        self._package = package
        self._handle = package.build_model(*arguments)

    def step(self, token_ids: Tensor, pos: int | Tensor) -> Tensor:
        logits: Tensor = self._package.decode_step(self._handle, token_ids, pos)
        return logits

    def close(self) -> None:
        self._package.teardown(self._handle)


def build_model(
    weights: Mapping[str, Any], kv_cache: Any, cfg: Mapping[str, Any], max_seq_len: int
) -> Handle:
    """Prepares the decoding of a Llama's sequences, of which the cache holds what came before.

    ``x = embed[token]``; for each layer ``h = rms_norm(x, in_norm)``; ``q, k, v = h Wq^T, h Wk^T,
    h Wv^T``, q and k rotated by their position; ``x += attention(q, K, V) Wo^T`` over the cache
    with k and v appended; ``h = rms_norm(x, post_norm)``; ``x += (silu(h Wgate^T) * h Wup^T)
    Wdown^T``; at last ``logits = rms_norm(x, final_norm) lm_head^T``. Rotary embedding pairs
    elements ``i`` and ``i + hd / 2`` and is computed in fp32; everything is rounded to the weights'
    dtype where Llama's modules of transformers round.

    Weights, cfg and page table are only read, and must not change while the handle lives. Nothing
    is written to the cache here. The composed implementation copies the weights of q, k and v.

    Args:
        weights: ``embed`` ``(vocab, d)``, ``final_norm`` ``(d,)``, ``lm_head`` ``(vocab, d)`` where
            ``cfg["tied"]`` is False, and ``layers``: a list of dicts of ``in_norm``, ``post_norm``
            ``(d,)``, ``q`` ``(n_q * hd, d)``, ``k``, ``v`` ``(n_kv * hd, d)``, ``o``
            ``(d, n_q * hd)``, ``gate``, ``up`` ``(ffn, d)``, ``down`` ``(d, ffn)``.
        kv_cache: a dict of ``k`` and ``v``, lists of a pool ``(pages, n_kv, page_size, hd)`` for
            each layer, ``page_table`` ``(B, pages of a sequence)``, int32, and ``page_size``: the
            token at position p of sequence b is in page ``page_table[b, p // page_size]``, slot
            ``p % page_size``. Or a list of ``(k, v)`` for each layer, ``(B, n_kv, tokens, hd)``.
        cfg: ``layers, d, ffn, n_q, n_kv, hd, vocab, eps, theta``; ``wdtype``, the dtype of weights,
            cache and logits: bf16, fp16 or fp32; optional ``page_size``, that of the cache;
            ``tied`` (True): whether ``embed`` is the head too; ``rope_scaling`` (None): ``factor``,
            ``low_freq_factor``, ``high_freq_factor``, ``original_max_position_embeddings`` of
            Llama 3.
        max_seq_len: tokens that a sequence may reach, at most what its pages hold.

    Returns:
        What `decode_step` takes. One handle serves one thread, and one stream at a time.

    Raises:
        ValueError: a key is missing; a shape, a device or a value does not fit; a page id is out of
            range; another value of ``ASTRAI_DECODE``.
        TypeError: an argument of another type, a tensor of another dtype.
        RuntimeError: `use` demands an implementation that cannot serve the call; a CUDA graph is
            being captured.
    """
    # Reading the page table waits for the device, which would break a capture.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("build_model: expected no capture of a CUDA graph to be under way")
    problem = Problem.parse(weights, kv_cache, cfg, max_seq_len)
    selection = select(problem, cfg)
    decoder: Decoder
    if selection.chosen == COMPOSED:
        decoder = ComposedDecoder(problem)
    elif selection.chosen == MEGAKERNEL:
        decoder = _Megakernel(selection.megakernel, weights, kv_cache, cfg, max_seq_len)
    else:
        decoder = TorchDecoder(problem)
    return Handle(problem, selection, decoder)


def decode_step(handle: Handle, token_ids: Tensor, pos: int | Tensor) -> Tensor:
    """Runs one token of each sequence through the model, and appends its keys and values.

    Does not wait for the device. Token ids, and a `pos` on the device, are therefore not checked:
    one that is out of range is an error of the device, or garbage. In a capture of a CUDA graph the
    step becomes part of that graph; a Python int is then fixed in it.

    Args:
        handle: of `build_model`.
        token_ids: ``(B,)``, int64, on the weights' device.
        pos: the position of these tokens, from 0: an int, or int64 on the device, ``()`` or
            ``(B,)``. All earlier positions must have been written.

    Returns:
        Logits ``(B, vocab)`` of the next tokens, in the weights' dtype; the caller's to keep.

    Raises:
        ValueError: a shape, a device or an int that does not fit; nothing was changed.
        TypeError: an argument of another type or dtype.
        RuntimeError: the handle was torn down.
    """
    return _own(handle).step(token_ids, pos)


def teardown(handle: Handle) -> None:
    """Gives back what a handle holds, once the device is done with it; a second time does nothing.

    Args:
        handle: of `build_model`; `decode_step` refuses it from now on.

    Raises:
        TypeError: it is no handle.
    """
    _own(handle).close()


def _own(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(f"handle: expected that of build_model, got {type(handle).__name__}")
    return handle


def _check(name: str, x: Any, shapes: list[tuple[int, ...]], device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if tuple(x.shape) not in shapes:
        expected = " or ".join(str([*shape]) for shape in shapes)
        raise ValueError(f"{name}: expected shape {expected}, got {[*x.shape]}")
    if x.dtype != torch.int64:
        raise TypeError(f"{name}: expected torch.int64, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got {x.device}")
