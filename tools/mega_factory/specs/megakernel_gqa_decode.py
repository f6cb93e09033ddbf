# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode over a contiguous KV cache at 2k of context."""

from mega_factory.models import contiguous
from mega_factory.spec import Figures, MegaSpec
from mega_factory.specs._common import (
    CORRECTNESS_MD,
    LLAMA_1B,
    PRECISION_MD,
    computation_md,
    contract_md,
    perf_md,
    regime_md,
    tolerance_md,
)

NAME = "megakernel-gqa-decode"
TOL = 6e-2
MEASURED = Figures.load(NAME)
DROPS = ["never_append", "wrong_kv_head"]

SPEC = MegaSpec(
    name=NAME,
    unfused_kernels=MEASURED.kernels if MEASURED else None,
    title="Write a whole-model decode megakernel (2k context)",
    blurb=(
        "One token of a Llama, from embedding to logits, in as few launches as you can: the step is a "
        "stream of 2.47 GB of weights, and what costs time beside it is that every layer waits for "
        "the one before."
    ),
    keywords=["mle", "kernel-generation", "megakernel", "persistent-kernel", "decode", "gqa"],
    cfg=LLAMA_1B,
    model_src=contiguous.MODEL_SRC,
    batch=1,
    prefill_len=2048,
    max_seq=2176,
    decode_steps=32,
    tol=TOL,
    drops=DROPS,
    measured=MEASURED,
    arg_doc=(
        "weights   : dict from the reference's make_weights (see /app/reference.py)"
        "\n    kv_cache  : list of (k, v), one pair per layer"
    ),
    spec_md=computation_md(LLAMA_1B, per_sequence=False),
    contract_md=contract_md(LLAMA_1B, batch=1, max_seq=2176, per_sequence=False),
    precision_md=PRECISION_MD + "\n\n" + tolerance_md(TOL, MEASURED, DROPS),
    correctness_md=CORRECTNESS_MD.format(tol=TOL),
    perf_md=perf_md(
        floor_us=529,
        eager_us=MEASURED.eager_us if MEASURED else None,
        graph_us=MEASURED.graph_us if MEASURED else None,
        graph_label="CUDA graph of the reference",
        bar="CUDA graph",
        lead="""A step reads **2.47 GB of weights and 68 MB of KV**: attention is 3% of the bytes, and
its keys and values lie in one piece per head.""",
        extra="""
* **The weights are a schedule.** Which bytes are needed, and in which order, is known before the
  step starts: nothing but space in shared memory keeps them from being fetched ahead.
* **The chain is the cost.** Every projection waits for all of the activations before it; what can be
  computed or fetched meanwhile is what decides the time.
* **Never expand GQA.** Four query heads share the keys and values of one KV head.""",
    ),
    regime_md=regime_md(
        LLAMA_1B,
        batch=1,
        context="The cache arrives holding **2048** tokens",
        decode_steps=32,
        traffic="2.47 GB of weights + 68 MB of KV puts the floor near 529 us.",
    ),
).validate()
