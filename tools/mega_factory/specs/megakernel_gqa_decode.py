# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode over a contiguous KV cache at 2k of context."""

from mega_factory.models import contiguous
from mega_factory.spec import Figures, MegaSpec, Perf, Traffic
from mega_factory.specs._common import (
    CORRECTNESS_MD,
    LLAMA_1B,
    PRECISION_MD,
    computation_md,
    contract_md,
    regime_md,
    tolerance_md,
)

NAME = "megakernel-gqa-decode"
TOL = 6e-2
MEASURED, CPU = Figures.load(NAME), Figures.load(NAME, "cpu")
DROPS = ["never_append", "wrong_kv_head"]
PREFILL, MAX_SEQ, STEPS = 2048, 2176, 32
TRAFFIC = Traffic(LLAMA_1B, PREFILL + STEPS)

SPEC = MegaSpec(
    name=NAME,
    unfused_kernels=MEASURED.kernels if MEASURED else None,
    title="Write a whole-model decode megakernel (2k context)",
    blurb=(
        "One token of a Llama, from embedding to logits, in as few launches as you can: the step is a "
        f"stream of {TRAFFIC.weights} of weights, and what costs time beside it is that every layer waits for "
        "the one before."
    ),
    keywords=["mle", "kernel-generation", "megakernel", "persistent-kernel", "decode", "gqa"],
    cfg=LLAMA_1B,
    model_src=contiguous.MODEL_SRC,
    batch=1,
    prefill_len=PREFILL,
    max_seq=MAX_SEQ,
    decode_steps=STEPS,
    tol=TOL,
    drops=DROPS,
    measured=MEASURED,
    cpu=CPU,
    arg_doc=(
        "weights   : dict from the reference's make_weights (see /app/reference.py)"
        "\n    kv_cache  : list of (k, v), one pair per layer"
    ),
    spec_md=computation_md(LLAMA_1B, per_sequence=False),
    contract_md=contract_md(LLAMA_1B, batch=1, max_seq=MAX_SEQ, per_sequence=False),
    precision_md=PRECISION_MD + "\n\n" + tolerance_md(TOL, MEASURED, CPU, DROPS),
    correctness_md=CORRECTNESS_MD.format(tol=TOL),
    perf_md=Perf(
        floor_us=round(TRAFFIC.floor_us),
        eager_us=MEASURED.eager_us if MEASURED else None,
        graph_us=MEASURED.graph_us if MEASURED else None,
        graph_label="CUDA graph of the reference",
        bar="CUDA graph",
        lead=f"""A step reads **{TRAFFIC.weights} of weights and {TRAFFIC.kv} of KV**: attention is {TRAFFIC.kv_percent}% of the
bytes, and its keys and values lie in one piece per head.""",
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
        context=f"The cache arrives holding **{PREFILL}** tokens",
        decode_steps=STEPS,
        traffic=TRAFFIC,
    ),
).validate()
