# SPDX-License-Identifier: Apache-2.0
"""Which kernels a step of composed decode runs, as the profiler sees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decode_model import Model
from torch.profiler import ProfilerActivity, profile

import astrai_core
from astrai_core.decode import build_model, decode_step, teardown

pytestmark = pytest.mark.gpu

WIDE = {"d": 512, "ffn": 1000, "n_q": 8, "n_kv": 2, "hd": 64, "vocab": 1003}


def on_device(call: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and fills that a call launches, in the order of their starts."""
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    found = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


def is_ours(name: str) -> bool:
    return "astrai::" in name


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_from_embedding_to_logits_all_kernels_are_the_families(kind: str) -> None:
    model = Model([9, 9], dtype=torch.bfloat16, device="cuda", changes=WIDE)
    with astrai_core.use(decode="composed"):
        handle = build_model(model.weights, model.cache(kind), model.cfg, model.capacity)
    ids = model.tokens()
    # A profiler's first trace may lack what starts before it is ready.
    on_device(lambda: decode_step(handle, ids, 9))
    # Its last kernel is the embedding.
    head = on_device(handle._decoder._head)
    step = on_device(lambda: decode_step(handle, ids, 10))
    ours = [index for index, name in enumerate(step) if is_ours(name)]
    # Of a layer: two norms, four products, rotary embedding, attention by call; then norm and head.
    calls = {"paged": 1, "contiguous": model.batch}[kind]
    assert len(ours) >= model.cfg["layers"] * (7 + calls) + 2, step
    first, last = ours[0], ours[-1]
    assert [name for name in step[first : last + 1] if not is_ours(name)] == []
    assert len(head) >= 3 and step[first - len(head) : first] == head, (head, step)
    # The caller's copy of the logits.
    assert [name.split()[0] for name in step[last + 1 :]] == ["Memcpy"], step
    teardown(handle)
