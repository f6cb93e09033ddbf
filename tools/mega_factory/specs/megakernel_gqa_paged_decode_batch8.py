# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode of eight sequences of different lengths over one paged KV cache."""

from mega_factory.models import paged
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

NAME = "megakernel-gqa-paged-decode-batch8"
TOL = 6e-2
CFG = LLAMA_1B | {"page_size": 128}
MEASURED = Figures.load(NAME)
DROPS = ["never_append", "ignore_table", "wrong_length", "wrong_kv_head"]

SPEC = MegaSpec(
    name=NAME,
    unfused_kernels=MEASURED.kernels if MEASURED else None,
    title="Write a whole-model decode megakernel for a ragged batch over a paged KV cache",
    blurb=(
        "Eight sequences, from 1 to 4000 tokens long, take a step together: the weights are read once "
        "for all of them, and the attention is as uneven as traffic makes it. Keys and values lie in "
        "pages that are scattered through one pool."
    ),
    keywords=[
        "mle",
        "kernel-generation",
        "megakernel",
        "persistent-kernel",
        "decode",
        "paged-attention",
        "kv-cache",
        "gqa",
        "ragged-batch",
    ],
    cfg=CFG,
    model_src=paged.MODEL_SRC,
    batch=8,
    prefill_len=4000,
    # An empty page in advance, a page that fills up in this run, one that has just begun, a long one.
    prefill_lens=[4000, 1, 1024, 127, 2048, 128, 3000, 511],
    max_seq=4096,
    decode_steps=32,
    tol=TOL,
    drops=DROPS,
    measured=MEASURED,
    arg_doc=(
        "weights   : dict from the reference's make_weights (see /app/reference.py)"
        "\n    kv_cache  : dict with paged pools, a page table and the page size"
    ),
    spec_md=computation_md(CFG, per_sequence=True)
    + """

### What the batch changes

* Every sequence has a position of its own: `pos` is a tensor on the GPU, so that rotation, slot and
  length of attention differ by sequence, and reading it on the host waits for the GPU.
* The pool holds 512 pages of 128 tokens per layer. This batch owns 256 of them, 32 per sequence,
  scattered; a sequence's later pages hold nothing yet.
* The longest sequence has 4000 times the keys of the shortest: one block per sequence, or per
  sequence and head, leaves most of the GPU waiting for one of them.
* A projection is a product with 8 columns: the weights stream as for one sequence, the arithmetic is
  eight times as much.""",
    contract_md=contract_md(CFG, batch=8, max_seq=4096, per_sequence=True),
    precision_md=PRECISION_MD + "\n\n" + tolerance_md(TOL, MEASURED, DROPS),
    correctness_md=CORRECTNESS_MD.format(tol=TOL),
    perf_md=perf_md(
        floor_us=591,
        eager_us=MEASURED.eager_us if MEASURED else None,
        graph_us=MEASURED.busy_us if MEASURED else None,
        graph_label="eager torch, GPU busy only",
        bar="GPU-busy",
        lead="""A step reads **2.47 GB of weights and 364 MB of KV**, the latter of eight sequences
between 1 and 4032 tokens.""",
        extra="""
* **The reference goes sequence by sequence** in attention, and copies each one's keys and values out
  of the pool. It reads positions and page ids on the host, so that it cannot be captured.
* **Split by pages, not by sequences.** A page of one KV head is the same work wherever it lies; a
  list of (sequence, page) pairs balances itself, and partial results merge by their maxima and sums.
* **Read a weight once for all eight.** Eight activations per weight fit the tensor cores' smallest
  tile.""",
    ),
    regime_md=regime_md(
        CFG,
        batch=8,
        context="The cache arrives holding between 1 and **4000** tokens of each sequence",
        decode_steps=32,
        traffic="2.47 GB of weights + 364 MB of KV puts the floor near 591 us.",
    ),
).validate()
