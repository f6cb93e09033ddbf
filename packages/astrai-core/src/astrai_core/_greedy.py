# SPDX-License-Identifier: Apache-2.0
"""Greedy text from a model of transformers, by `astrai_core.decode` or by its own forward."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .decode import Llama, build_model, decode_step, kv_cache_of, prefill, teardown

__all__ = ["Decoding", "Forward", "by_transformers", "greedy"]

Forward = Callable[[Tensor], Tensor]
"""Takes the next tokens of a sequence, ``[1, L]``; gives the logits after the last, ``[1, V]``."""


def greedy(
    forward: Forward, ids: Tensor, ends: list[int], max_new_tokens: int
) -> Iterator[tuple[int, float]]:
    """Continues a prompt with the most likely tokens, up to and including an end token.

    Args:
        forward: the model.
        ids: the prompt, ``[1, tokens]``.
        ends: tokens that end the text.
        max_new_tokens: how many tokens to produce at most.

    Yields:
        Each token once it is known, and the seconds it took; the first one's are the prompt's.
    """
    for _ in range(max_new_tokens):
        start = time.perf_counter()
        ids = forward(ids).argmax(-1, keepdim=True)
        token = int(ids)  # waits for the device, so that the time is the whole step's
        yield token, time.perf_counter() - start
        if token in ends:
            return


class Decoding:
    """A forward through `astrai_core.decode`, for `contextlib.closing`.

    Args:
        model: the model.
        tokens: how many tokens the sequence may get.

    Attributes:
        implementation: what decodes: ``torch``, ``composed`` or ``megakernel``.
        passed_over: why the others do not.

    Raises:
        ValueError: ``ASTRAI_DECODE`` has a value that is none.
        RuntimeError: `use` demands an implementation that cannot serve the model.
    """

    def __init__(self, model: Llama, tokens: int) -> None:
        self._model = model
        self._cache = model.new_cache(tokens)
        self._seq = self._cache.new_sequence()
        # A handle's table is fixed.
        self._cache.reserve(self._seq, tokens)
        pages = kv_cache_of(self._cache, [self._seq])
        self._handle = build_model(model.weights, pages, model.cfg, tokens)
        self._length = 0
        self.implementation = self._handle.implementation
        self.passed_over: Mapping[str, str] = self._handle.passed_over

    def __call__(self, ids: Tensor) -> Tensor:
        """The next tokens of the sequence: ``[1, L]`` the first time, then ``[1, 1]``.

        Raises:
            ValueError: another shape.
        """
        if self._length == 0:
            step = self._cache.begin_step([self._seq], ids.shape[-1])
            logits = prefill(*self._model, ids, step)
        elif ids.shape == (1, 1):
            logits = decode_step(self._handle, ids[0], self._length)
        else:
            raise ValueError(f"ids: expected [1, 1] after the prompt, got {[*ids.shape]}")
        self._length += ids.shape[-1]
        return logits

    def close(self) -> None:
        """Tears the handle down."""
        teardown(self._handle)


def by_transformers(model: Any) -> Forward:
    """A forward through the modules of a causal language model, with the cache of its own."""
    # Its older name still works in the releases that have the new one, with a warning.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = None

    def forward(ids: Tensor) -> Tensor:
        nonlocal cache
        # One row of logits: on the way in, the prompt's others would be computed for nothing.
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})
        cache = out[name]
        logits: Tensor = out.logits[:, -1]
        return logits

    return forward
