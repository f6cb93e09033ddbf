# SPDX-License-Identifier: Apache-2.0
"""`build_model`, `decode_step`, `teardown`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from astrai_core import recording

from ._arguments import Problem
from ._checks import indices, no_autocast
from ._composed import ComposedDecoder
from ._megakernel import MegakernelDecoder
from ._select import COMPOSED, MEGAKERNEL, Selection, select
from ._torch import TorchDecoder

__all__ = ["Handle", "build_model", "decode_step", "teardown"]


class Decoder(Protocol):
    """An implementation, built for a `Problem`."""

    def step(self, token_ids: Tensor, pos: int | Tensor) -> Tensor:
        """`decode_step`, for arguments that it has checked."""

    def close(self) -> None:
        """Gives back what it holds; its steps have ended."""

    def tensors(self) -> list[Tensor]:
        """What it allocated, and `step` uses."""


class Handle:
    """What `build_model` returns: opaque, but for what decodes and why.

    Attributes:
        implementation: ``torch``, ``composed`` or ``megakernel``.
        passed_over: why the others do not decode.
    """

    def __init__(self, problem: Problem, selection: Selection, decoder: Decoder) -> None:
        self.implementation = selection.chosen
        self._decoder: Decoder | None = decoder
        self._batch, self._vocab = problem.cache.batch, problem.config.vocab
        self._is_inference = problem.cache.is_inference
        self._streams: set[Any] = set()
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
        indices("token_ids", token_ids, [(self._batch,)], self._device, self._vocab)
        if isinstance(pos, Tensor):
            indices("pos", pos, [(), (self._batch,)], self._device, self._max_seq_len)
        elif type(pos) is not int:
            raise TypeError(f"pos: expected an int or a tensor, got {type(pos).__name__}")
        elif not 0 <= pos < self._max_seq_len:
            raise ValueError(f"pos: expected 0 to {self._max_seq_len - 1}, got {pos}")
        if self._is_inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "handle: expected inference mode, as its kv_cache holds inference tensors"
            )
        self._record(f"decode_step: token_ids [{self._batch}]")
        self._keep_for_stream(self._decoder)
        with no_autocast(self._device):
            return self._decoder.step(token_ids, pos)

    def close(self) -> None:
        """`teardown`."""
        if self._decoder is None:
            return
        _refuse_in_capture("teardown")
        # Not for the device: a kernel of the megakernel's may run on until its teardown.
        for stream in self._streams:
            stream.synchronize()
        self._decoder.close()
        self._decoder = None

    def _keep_for_stream(self, decoder: Decoder) -> None:
        """Keeps the decoder's memory from others until the current stream is done with it.

        A handle may be dropped while a step of it runs; without this, memory that was allocated on
        another stream would be given away at once. Once for a stream is enough: what counts is
        what the stream has been given when the memory is freed.
        """
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device)
        if stream not in self._streams:
            self._streams.add(stream)
            for x in decoder.tensors():
                x.record_stream(stream)

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

    Nothing is written to the cache here. Weights are only read, and must not change while the
    handle lives: implementations may copy them, as the composed one copies those of q, k and v. The
    page table is copied. Sequences may have pages in common that hold earlier tokens only: no
    position that the handle writes may be in one, which cannot be seen here.

    Args:
        weights: ``embed`` ``(vocab, d)``, ``final_norm`` ``(d,)``, ``lm_head`` ``(vocab, d)`` where
            ``cfg["tied"]`` is False, and ``layers``: a list of dicts of ``in_norm``, ``post_norm``
            ``(d,)``, ``q`` ``(n_q * hd, d)``, ``k``, ``v`` ``(n_kv * hd, d)``, ``o``
            ``(d, n_q * hd)``, ``gate``, ``up`` ``(ffn, d)``, ``down`` ``(d, ffn)``.
        kv_cache: a dict of ``k`` and ``v``, lists of a pool ``(pages, n_kv, page_size, hd)`` for
            each layer, ``page_table`` ``(B, pages of a sequence)``, int32, and ``page_size``: the
            token at position p of sequence b is in page ``page_table[b, p // page_size]``, slot
            ``p % page_size``. Or a list of ``(k, v)`` for each layer, ``(B, n_kv, tokens, hd)``.
            A contiguous cache is taken for pages of the largest power of two up to 256 that divides
            its tokens; the composed implementation is slow where that is below 16.
        cfg: ``layers, d, ffn, n_q, n_kv, hd, vocab, eps, theta``; ``wdtype``, the dtype of weights,
            cache and logits: bf16, fp16 or fp32; optional ``page_size``, that of the cache;
            ``tied`` (True): whether ``embed`` is the head too; ``rope_scaling`` (None): ``factor``,
            ``low_freq_factor``, ``high_freq_factor``, ``original_max_position_embeddings`` of
            Llama 3.
        max_seq_len: tokens that a sequence may reach, at most what its pages hold.

    Returns:
        What `decode_step` takes. One handle serves one thread, and one stream at a time. It may be
        dropped without `teardown`, even while a step of it runs; but not while a CUDA graph that
        has captured a step is still used. Weights and cache are the caller's to keep until then.

    Raises:
        ValueError: a key is missing; a shape, a device, a layout or a value does not fit; pools of
            the cache share memory, or are inference tensors outside of inference mode; a page id is
            out of range, or twice in a row; another value of ``ASTRAI_DECODE``.
        TypeError: an argument of another type, a tensor of another dtype.
        RuntimeError: `use` demands an implementation that cannot serve the call; a CUDA graph is
            being captured.
    """
    _refuse_in_capture("build_model")
    problem = Problem.parse(weights, kv_cache, cfg, max_seq_len)
    decoder: Decoder
    with no_autocast(problem.device):
        selection = select(problem, cfg)
        if selection.chosen == COMPOSED:
            decoder = ComposedDecoder(problem)
        elif selection.chosen == MEGAKERNEL:
            decoder = MegakernelDecoder(selection.package, problem, cfg)
        else:
            decoder = TorchDecoder(problem)
    return Handle(problem, selection, decoder)


def decode_step(handle: Handle, token_ids: Tensor, pos: int | Tensor) -> Tensor:
    """Runs one token of each sequence through the model, and appends its keys and values.

    Does not wait for a GPU. A token id or a `pos` on it that is out of range is therefore found by
    the GPU: an assertion, after which CUDA cannot be used in the process any more; nothing outside
    of the sequences' own pages is written. In a capture of a CUDA graph the step becomes part of
    that graph, which needs the handle; a Python int is then fixed in it. Autocast has no effect.

    Args:
        handle: of `build_model`.
        token_ids: ``(B,)``, int64, on the weights' device.
        pos: the position of these tokens, from 0: an int, or int64 on the device, ``()`` or
            ``(B,)``. All earlier positions must have been written.

    Returns:
        Logits ``(B, vocab)`` of the next tokens, in the weights' dtype; the caller's to keep.

    Raises:
        ValueError: a shape or a device that does not fit; an int, or a number on the CPU, that is
            out of range. Nothing was changed.
        TypeError: an argument of another type or dtype.
        RuntimeError: the handle was torn down; the cache holds inference tensors and inference mode
            is off; the megakernel returned something else than logits.
    """
    return _own(handle).step(token_ids, pos)


def teardown(handle: Handle) -> None:
    """Gives back what a handle holds, once its steps have ended; a second time does nothing.

    Args:
        handle: of `build_model`; `decode_step` refuses it from now on.

    Raises:
        TypeError: it is no handle.
        RuntimeError: a CUDA graph is being captured; the handle stays in use.
    """
    _own(handle).close()


def _own(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(f"handle: expected that of build_model, got {type(handle).__name__}")
    return handle


def _refuse_in_capture(function: str) -> None:
    """For functions that wait for the device, which would break a capture.

    Raises:
        RuntimeError: the current stream is being captured.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{function}: expected no capture of a CUDA graph to be under way")
