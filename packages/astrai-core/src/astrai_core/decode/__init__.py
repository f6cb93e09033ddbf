# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode: one token of each sequence through all layers of a Llama, in one call.

::

    model = from_transformers(network)
    tokens = prompt.numel() + 100
    cache = model.new_cache(tokens)
    seq = cache.new_sequence()
    cache.reserve(seq, tokens)  # the table is fixed from build_model on
    handle = build_model(model.weights, kv_cache_of(cache, [seq]), model.cfg, tokens)
    logits = prefill(*model, prompt, cache.begin_step([seq], prompt.numel()))
    for pos in range(prompt.numel(), tokens):
        logits = decode_step(handle, logits.argmax(-1), pos)
    teardown(handle)

`build_model` selects an implementation once, for the life of its handle: by context
(``astrai_core.use(decode=...)``, strict), then ``ASTRAI_DECODE`` = ``torch``, ``composed``,
``megakernel`` or ``auto``, then the measured table, then torch.
"""

from __future__ import annotations

from ._handle import Handle, build_model, decode_step, teardown
from ._llama import Llama, from_transformers, kv_cache_of
from ._prefill import prefill

__all__ = [
    "Handle",
    "Llama",
    "build_model",
    "decode_step",
    "from_transformers",
    "kv_cache_of",
    "prefill",
    "teardown",
]
