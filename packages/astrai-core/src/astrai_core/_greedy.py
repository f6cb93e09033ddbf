# SPDX-License-Identifier: Apache-2.0
"""Greedy text from a model of transformers, by `astrai_core.decode` or by its own forward."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .decode import Llama, build_model, decode_step, kv_cache_of, prefill

__all__ = ["Forward", "by_decode", "by_transformers", "greedy"]

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


def by_decode(model: Llama, tokens: int) -> Forward:
    """A forward through `astrai_core.decode`, which is built here for so many tokens."""
    cache = model.new_cache(tokens)
    seq = cache.new_sequence()
    # A handle's table is fixed.
    cache.reserve(seq, tokens)
    handle = build_model(model.weights, kv_cache_of(cache, [seq]), model.cfg, tokens)
    length = 0

    def forward(ids: Tensor) -> Tensor:
        nonlocal length
        length += ids.shape[-1]
        if length == ids.shape[-1]:
            return prefill(model.weights, model.cfg, ids, cache.begin_step([seq], length))
        return decode_step(handle, ids[:, -1], length - 1)

    return forward


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
