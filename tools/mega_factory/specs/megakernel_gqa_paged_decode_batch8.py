# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode of eight sequences of different lengths over one paged KV cache."""

import math

from mega_factory.models import paged
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

NAME = "megakernel-gqa-paged-decode-batch8"
TOL = 6e-2
CFG = LLAMA_1B | {"page_size": 128}
MEASURED, CPU = Figures.load(NAME), Figures.load(NAME, "cpu")
DROPS = ["never_append", "ignore_table", "wrong_length", "wrong_kv_head"]
# An empty page in advance, a page that fills up in this run, one that has just begun, a long one.
LENS = [4000, 1, 1024, 127, 2048, 128, 3000, 511]
MAX_SEQ, STEPS = 4096, 32
TRAFFIC = Traffic(CFG, sum(LENS) + len(LENS) * STEPS)
PER_SEQ = math.ceil(MAX_SEQ / CFG["page_size"])

SPEC = MegaSpec(
    name=NAME,
    unfused_kernels=MEASURED.kernels if MEASURED else None,
    title="Write a whole-model decode megakernel for a ragged batch over a paged KV cache",
    blurb=(
        f"Eight sequences, from {min(LENS)} to {max(LENS)} tokens long, take a step together: the weights are read once "
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
    batch=len(LENS),
    prefill_len=max(LENS),
    prefill_lens=LENS,
    max_seq=MAX_SEQ,
    decode_steps=STEPS,
    tol=TOL,
    drops=DROPS,
    measured=MEASURED,
    cpu=CPU,
    arg_doc=(
        "weights   : dict from the reference's make_weights (see /app/reference.py)"
        "\n    kv_cache  : dict with paged pools, a page table and the page size"
    ),
    spec_md=computation_md(CFG, per_sequence=True)
    + f"""

### What the batch changes

* Every sequence has a position of its own: `pos` is a tensor on the GPU, so that rotation, slot and
  length of attention differ by sequence, and reading it on the host waits for the GPU.
* The pool holds {2 * len(LENS) * PER_SEQ} pages of {CFG["page_size"]} tokens per layer. This batch owns {len(LENS) * PER_SEQ} of them, {PER_SEQ} per sequence,
  scattered; a sequence's later pages hold nothing yet.
* The longest sequence has {max(LENS) // min(LENS)} times the keys of the shortest: one block per sequence, or per
  sequence and head, leaves most of the GPU waiting for one of them.
* A projection is a product with {len(LENS)} columns: the weights stream as for one sequence, the arithmetic is
  eight times as much.""",
    contract_md=contract_md(CFG, batch=len(LENS), max_seq=MAX_SEQ, per_sequence=True),
    precision_md=PRECISION_MD + "\n\n" + tolerance_md(TOL, MEASURED, CPU, DROPS),
    correctness_md=CORRECTNESS_MD.format(tol=TOL),
    perf_md=Perf(
        floor_us=round(TRAFFIC.floor_us),
        eager_us=MEASURED.eager_us if MEASURED else None,
        graph_us=MEASURED.busy_us if MEASURED else None,
        graph_label="eager torch, GPU busy only",
        bar="GPU-busy",
        lead=f"""A step reads **{TRAFFIC.weights} of weights and {TRAFFIC.kv} of KV**, the latter of eight
sequences between {min(LENS) + STEPS} and {max(LENS) + STEPS} tokens long.""",
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
        batch=len(LENS),
        context=f"The cache arrives holding between {min(LENS)} and **{max(LENS)}** tokens of each sequence",
        decode_steps=STEPS,
        traffic=TRAFFIC,
    ),
).validate()
