# SPDX-License-Identifier: Apache-2.0
"""Model shapes and texts that tasks share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mega_factory.spec import UNMEASURED, Cfg, Figures, Perf, Traffic
from mega_factory.twins import CORRECT, DROPS

LLAMA_1B: Cfg = {
    "layers": 16, "d": 2048, "ffn": 8192, "n_q": 32, "n_kv": 8, "hd": 64, "vocab": 128256,
    "eps": 1e-5, "theta": 500000.0, "wdtype": "bf16",
}  # fmt: skip
SMOLLM2_135M: Cfg = {
    "layers": 30, "d": 576, "ffn": 1536, "n_q": 9, "n_kv": 3, "hd": 64, "vocab": 49152,
    "eps": 1e-5, "theta": 100000.0, "wdtype": "bf16",
}  # fmt: skip

CORRECTNESS_MD = """`grade.py` decodes `decode_steps` positions in a row, in runs with fresh weights,
cache and tokens, and compares **every** step with the reference on the same inputs:

* `||logits - reference|| / ||reference||`, over the vocabulary in fp32, is at most **{tol}** for
  each sequence.
* K and V of every position that was decoded are in the cache, near the reference's values; nothing
  else in the cache changed, and neither did weights or arguments.
* Half of the memory that you must not read holds NaN: slots past `pos` and, where the cache is paged,
  the pages of other sequences.
* Logits are computed in this process, in this step: none from an earlier one, none by a child
  process, none in the memory of an argument. Work on side streams is done when the current stream
  reaches the end of `decode_step`."""

PRECISION_MD = """The reference rounds to bf16 after every projection, norm, rotation and residual
sum, and to bf16 scores; RMSNorm, rotation and softmax compute in fp32 (half-split rotary pairs: `i`
with `i + hd/2`). You need not round where it does: accumulate in fp32, keep the residual stream in
bf16 or fp32. Weights and cache are bf16, and the cache stays so."""


# The performance section of a task, by the name that task files know it by.
perf_md = Perf


def sci(value: float) -> str:
    """An error as a table has it, such as 2.77e-2: three digits, the exponent without zeros."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(value))
    digits = f"{float(f'{value / 10**exponent:.3g}'):g}"
    return digits if exponent == 0 else f"{digits}e{exponent}"


def tolerance_md(
    tol: float, measured: Figures | None, cpu: Figures | None, drops: Sequence[str]
) -> str:
    """Where the tolerance comes from: a table of errors, of a GPU or, before that, of a CPU."""
    named = {name: CORRECT[name] for name in CORRECT} | {name: DROPS[name] for name in drops}
    figures = measured or cpu
    errors = {} if figures is None else figures.errors | figures.drops
    lines = [
        f"| {text} | {sci(errors[name]) if name in errors else UNMEASURED} |"
        for name, text in named.items()
    ]
    lines.insert(len(CORRECT), f"| *(the gate)* | *{sci(tol)}* |")
    table = "\n".join(["| implementation | worst relative error |", "|---|---|", *lines])
    if figures is None:
        lacks = "It is **not yet backed by any measurement**."
        return f"**Where the tolerance comes from.** `tol` is `{sci(tol)}`. {lacks}\n\n{table}"
    gpu = "" if measured else " It is **not yet measured on a GPU**."
    place = f"on {figures.measured_on}" if measured else "on a CPU, whose random numbers are others"
    return f"""**Where the tolerance comes from.** `tol` is `{sci(tol)}`.{gpu}
Each implementation was run against the reference on the graded fixtures,
{place} ({figures.steps} consecutive steps, {figures.seeds} seeds of weights,
cache and tokens):

{table}"""


def computation_md(cfg: Cfg, *, per_sequence: bool) -> str:
    """The decoder step in pseudocode; the cache is paged if `cfg` has a page size."""
    at = "pos[b]" if per_sequence else "pos"
    if "page_size" in cfg:
        cache = f"""\
    page  = page_table[b, {at} // page_size]       # PHYSICAL page for this logical position
    slot  = {at} % page_size
    k_pool[li][page, :, slot] = k                 # append THIS position into its page
    v_pool[li][page, :, slot] = v

    K = concat over j of k_pool[li][page_table[b, j]]   # logical KV, gathered through the table
    V = concat over j of v_pool[li][page_table[b, j]]"""
    else:
        cache = f"""\
    K, V = kv_cache[li][0][b], kv_cache[li][1][b]
    K[:, {at}] = k                                # append THIS position
    V[:, {at}] = v"""
    head = "embed" if cfg.get("tied", True) else "lm_head"
    return f"""## The computation

A decoder layer, repeated {cfg["layers"]} times, then the LM head. There are {cfg["n_q"]} query and
{cfg["n_kv"]} KV heads: {cfg["n_q"] // cfg["n_kv"]} query heads in a row share one KV head.

```
x = embed[token_ids]
for layer li:
    h     = rmsnorm(x, in_norm)
    q,k,v = h @ Wq.T, h @ Wk.T, h @ Wv.T
    q,k   = rope(q, {at}), rope(k, {at})

{cache}
    a = softmax(q @ K[:{at}+1].T / sqrt(hd)) @ V[:{at}+1]
    x = x + a_flat @ Wo.T
    h = rmsnorm(x, post_norm)
    x = x + (silu(h @ Wgate.T) * (h @ Wup.T)) @ Wdown.T
logits = rmsnorm(x, final_norm) @ {head}.T
```

`/app/reference.py` implements exactly this, unfused, in eager torch."""


def contract_md(cfg: Cfg, *, batch: int, max_seq: int, per_sequence: bool) -> str:
    """Arguments with their shapes, the result, and what may be written."""
    layers, vocab, d, tied = cfg["layers"], cfg["vocab"], cfg["d"], cfg.get("tied", True)
    if "page_size" in cfg:
        n_pages = 2 * batch * math.ceil(max_seq / cfg["page_size"])
        cache = f"""\
| `kv_cache` | `dict` | see rows below | keys: `k`, `v`, `page_table`, `page_size` |
| `kv_cache["k"]` | `list` of {layers} tensors, each `(n_pages, n_kv, page_size, hd)` | `bfloat16` | per-layer key page pool. `n_pages` = `2 * B * ceil(max_seq_len / page_size)` = {n_pages} -- **twice** what this batch needs; the surplus pages hold other sequences' KV |
| `kv_cache["v"]` | same shape as `["k"]` | `bfloat16` | the value pool |
| `kv_cache["page_table"]` | `(B, pages_per_seq)` | `int32`, on the GPU | `page_table[b, j]` is the physical page of logical positions `[j*page_size, (j+1)*page_size)` of sequence `b`. A random selection of half the pool, in random order; fixed for the life of the handle |
| `kv_cache["page_size"]` | scalar | python `int` | `{cfg["page_size"]}` -- also `cfg["page_size"]` |"""
        read_only, pools = '`weights`, `cfg` and `kv_cache["page_table"]`', "`k` and `v` pools"
    else:
        shape = f"({batch}, {cfg['n_kv']}, {max_seq}, {cfg['hd']})"
        cache = f"""\
| `kv_cache` | `list` of {layers} pairs `(k, v)`, each tensor `(B, n_kv, max_seq_len, hd)` = `{shape}` | `bfloat16` | per-layer keys and values. Slots past a sequence's tokens hold leftovers that you must not read |"""
        read_only, pools = "`weights` and `cfg`", "caches"
    if per_sequence:
        pos = "| `pos` | `(B,)` | `int64`, on the GPU | the absolute **logical** position that this call writes, of each sequence; each advances by 1 per call |"
    else:
        pos = "| `pos` | scalar | python `int` | the absolute **logical** position that this call writes, of every sequence; it advances by 1 per call |"
    head = (
        ""
        if tied
        else f"""
| `weights["lm_head"]` | `(vocab, d)` = `({vocab}, {d})` | `bfloat16` | the LM head, used as `lm_head.T` |"""
    )
    also = "; also the **tied** LM head, used as `embed.T`" if tied else ""
    return f"""```python
def build_model(weights, kv_cache, cfg, max_seq_len) -> handle    # UNTIMED
def decode_step(handle, token_ids, pos) -> logits                 # TIMED
def teardown(handle)                                              # OPTIONAL
```

| arg | shape | dtype | meaning |
|-----|-------|-------|---------|
| `weights` | `dict` | `bfloat16` throughout | keys: `embed`, `final_norm`, `layers` (a `list` of {layers} dicts){"" if tied else ", `lm_head`"} |
| `weights["embed"]` | `(vocab, d)` = `({vocab}, {d})` | `bfloat16` | token embedding table{also} |{head}
| `weights["final_norm"]` | `(d,)` | `bfloat16` | RMSNorm gain before the LM head |
| `weights["layers"][i]` | 9 tensors | `bfloat16` | `in_norm (d,)`, `post_norm (d,)`, `q (n_q*hd, d)`, `k (n_kv*hd, d)`, `v (n_kv*hd, d)`, `o (d, n_q*hd)`, `gate (ffn, d)`, `up (ffn, d)`, `down (d, ffn)` -- row-major, applied as `h @ W.T` |
{cache}
| `cfg` | `dict` | python `int` / `float` / `str` | `{", ".join(cfg)}` |
| `max_seq_len` | scalar | python `int` | `{max_seq}` -- capacity of the cache; a position is always below it |
| `token_ids` | `(B,)` | `int64`, on the GPU | this step's input token, one per sequence |
{pos}

**Return** -- `decode_step` returns a **single tensor** `logits` of shape `(B, vocab)` =
`({batch}, {vocab})`, **bf16 or fp32** (the grader compares in fp32). `build_model` returns an opaque
handle of any type, which is only passed back to `decode_step` and `teardown`.

{read_only} are **read-only**. The {pools} must be updated **in place**, at the position that the call
writes and nowhere else.

`build_model` is untimed: repack weights, allocate scratch, capture a graph, launch a persistent
kernel, build an instruction schedule."""


def regime_md(cfg: Cfg, *, batch: int, context: str, decode_steps: int, traffic: Traffic) -> str:
    """Sizes in one paragraph; `context` says what the cache holds, `traffic` is a step's."""
    paged = (
        f" KV is **paged**: {cfg['page_size']}-token pages, scattered."
        if "page_size" in cfg
        else ""
    )
    return (
        f"**Regime**: batch {batch}, {cfg['layers']} layers, `d`={cfg['d']}, ffn={cfg['ffn']},"
        f" {cfg['n_q']} query / {cfg['n_kv']} KV heads, head_dim {cfg['hd']}, vocab {cfg['vocab']},"
        f" {'tied' if cfg.get('tied', True) else 'untied'} LM head.{paged} {context}, and you decode"
        f" {decode_steps} more. {traffic.weights} of weights + {traffic.kv} of KV puts the floor near"
        f" {traffic.floor_us:.0f} us."
    )
