# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode of a small, deep model over a contiguous KV cache at 4k of context."""

from mega_factory.models import contiguous
from mega_factory.spec import Figures, MegaSpec, Perf, Traffic
from mega_factory.specs._common import (
    CORRECTNESS_MD,
    PRECISION_MD,
    SMOLLM2_135M,
    computation_md,
    contract_md,
    regime_md,
    tolerance_md,
)

NAME = "megakernel-smollm2-decode"
TOL = 8e-2
MEASURED, CPU = Figures.load(NAME), Figures.load(NAME, "cpu")
DROPS = ["never_append", "wrong_kv_head"]
PREFILL, MAX_SEQ, STEPS = 4096, 4224, 32
TRAFFIC = Traffic(SMOLLM2_135M, PREFILL + STEPS)
HEAD_BYTES = 2 * SMOLLM2_135M["vocab"] * SMOLLM2_135M["d"]
LAYER_MB = (TRAFFIC.weight_bytes - HEAD_BYTES) / SMOLLM2_135M["layers"] / 1e6

SPEC = MegaSpec(
    name=NAME,
    unfused_kernels=MEASURED.kernels if MEASURED else None,
    title="Write a whole-model decode megakernel for SmolLM2-135M's shape (4k context)",
    blurb=(
        f"Thirty layers of width {SMOLLM2_135M['d']}: a layer's weights are {LAYER_MB:.0f} MB, which the GPU reads in less time than "
        "two launches take, and the chain through all of them is twice as long as that of a model with "
        "nine times the weights. Here the hand-off between phases is most of the time."
    ),
    keywords=["mle", "kernel-generation", "megakernel", "persistent-kernel", "decode", "gqa"],
    cfg=SMOLLM2_135M,
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
    spec_md=computation_md(SMOLLM2_135M, per_sequence=False),
    contract_md=contract_md(SMOLLM2_135M, batch=1, max_seq=MAX_SEQ, per_sequence=False),
    precision_md=PRECISION_MD + "\n\n" + tolerance_md(TOL, MEASURED, CPU, DROPS),
    correctness_md=CORRECTNESS_MD.format(tol=TOL),
    perf_md=Perf(
        floor_us=round(TRAFFIC.floor_us),
        eager_us=MEASURED.eager_us if MEASURED else None,
        graph_us=MEASURED.graph_us if MEASURED else None,
        graph_label="CUDA graph of the reference",
        bar="CUDA graph",
        lead=f"""A step reads **{TRAFFIC.weights} of weights and {TRAFFIC.kv} of KV**. At 4k of context the cache is a
quarter of the bytes: small models have few parameters per key.""",
        extra=f"""
* **Count the waits.** Thirty layers of at least five dependent phases each: a microsecond per
  hand-off is twice the floor.
* **Sizes divide by 3.** Nine query heads over three KV heads, width
  {SMOLLM2_135M["d"]} = {SMOLLM2_135M["n_q"]} * {SMOLLM2_135M["hd"]}: tiles of powers of two do not come out even.""",
    ),
    regime_md=regime_md(
        SMOLLM2_135M,
        batch=1,
        context=f"The cache arrives holding **{PREFILL}** tokens",
        decode_steps=STEPS,
        traffic=TRAFFIC,
    ),
).validate()
