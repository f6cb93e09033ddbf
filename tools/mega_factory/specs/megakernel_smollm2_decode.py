# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode of a small, deep model over a contiguous KV cache at 4k of context."""

from mega_factory.models import contiguous
from mega_factory.spec import Figures, MegaSpec
from mega_factory.specs._common import (
    CORRECTNESS_MD,
    PRECISION_MD,
    SMOLLM2_135M,
    computation_md,
    contract_md,
    perf_md,
    regime_md,
    tolerance_md,
)

NAME = "megakernel-smollm2-decode"
TOL = 8e-2
MEASURED = Figures.load(NAME)
DROPS = ["never_append", "wrong_kv_head"]

SPEC = MegaSpec(
    name=NAME,
    unfused_kernels=MEASURED.kernels if MEASURED else None,
    title="Write a whole-model decode megakernel for SmolLM2-135M's shape (4k context)",
    blurb=(
        "Thirty layers of width 576: a layer's weights are 7 MB, which the GPU reads in less time than "
        "two launches take, and the chain through all of them is twice as long as that of a model with "
        "nine times the weights. Here the hand-off between phases is most of the time."
    ),
    keywords=["mle", "kernel-generation", "megakernel", "persistent-kernel", "decode", "gqa"],
    cfg=SMOLLM2_135M,
    model_src=contiguous.MODEL_SRC,
    batch=1,
    prefill_len=4096,
    max_seq=4224,
    decode_steps=32,
    tol=TOL,
    drops=DROPS,
    measured=MEASURED,
    arg_doc=(
        "weights   : dict from the reference's make_weights (see /app/reference.py)"
        "\n    kv_cache  : list of (k, v), one pair per layer"
    ),
    spec_md=computation_md(SMOLLM2_135M, per_sequence=False),
    contract_md=contract_md(SMOLLM2_135M, batch=1, max_seq=4224, per_sequence=False),
    precision_md=PRECISION_MD + "\n\n" + tolerance_md(TOL, MEASURED, DROPS),
    correctness_md=CORRECTNESS_MD.format(tol=TOL),
    perf_md=perf_md(
        floor_us=76,
        eager_us=MEASURED.eager_us if MEASURED else None,
        graph_us=MEASURED.graph_us if MEASURED else None,
        graph_label="CUDA graph of the reference",
        bar="CUDA graph",
        lead="""A step reads **0.269 GB of weights and 95 MB of KV**. At 4k of context the cache is a
quarter of the bytes: small models have few parameters per key.""",
        extra="""
* **Count the waits.** Thirty layers of at least five dependent phases each: a microsecond per
  hand-off is twice the floor.
* **Sizes divide by 3.** Nine query heads over three KV heads, width 576 = 9 * 64: tiles of powers of
  two do not come out even.""",
    ),
    regime_md=regime_md(
        SMOLLM2_135M,
        batch=1,
        context="The cache arrives holding **4096** tokens",
        decode_steps=32,
        traffic="0.269 GB of weights + 95 MB of KV puts the floor near 76 us.",
    ),
).validate()
