# SPDX-License-Identifier: Apache-2.0
"""What a spec's contract must say of each argument: a table row with its true shape and dtype."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mega_factory.spec import MegaSpec

BF16, INT, INT64 = "`bfloat16`", "python `int`", "`int64`, on the GPU"


@dataclass(frozen=True)
class Row:
    """What a row states: the cells of shape and dtype as they are, and phrases of the last cell."""

    shape: str
    dtype: str
    phrases: tuple[str, ...] = ()


def rows(contract_md: str) -> dict[str, list[str]]:
    """The cells of each argument in the contract's table, by its name in backticks."""
    lines = (line for line in contract_md.splitlines() if line.startswith("| `"))
    return {
        line.split("`")[1]: [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in lines
    }


def arguments(spec: MegaSpec) -> dict[str, Row]:
    """What the contract's row of each argument states."""
    cfg, layers = spec.cfg, spec.cfg["layers"]
    table = Row(f"`(vocab, d)` = `({cfg['vocab']}, {cfg['d']})`", BF16)
    tensors = (
        "in_norm (d,)", "post_norm (d,)", "q (n_q*hd, d)", "k (n_kv*hd, d)", "v (n_kv*hd, d)",
        "o (d, n_q*hd)", "gate (ffn, d)", "up (ffn, d)", "down (d, ffn)",
    )  # fmt: skip
    wanted = {
        "weights": Row("`dict`", f"{BF16} throughout", (f"{layers} dicts",)),
        'weights["embed"]': table,
        'weights["final_norm"]': Row("`(d,)`", BF16),
        'weights["layers"][i]': Row("9 tensors", BF16, tuple(f"`{text}`" for text in tensors)),
        "cfg": Row("`dict`", f"{INT} / `float` / `str`", (f"`{', '.join(cfg)}`",)),
        "max_seq_len": Row("scalar", INT, (f"`{spec.max_seq}`",)),
        "token_ids": Row("`(B,)`", INT64),
        "pos": Row("`(B,)`", INT64) if spec.per_sequence_pos else Row("scalar", INT),
    }
    if not cfg.get("tied", True):
        wanted['weights["lm_head"]'] = table
    if spec.kind == "contiguous":
        shape = f"({spec.batch}, {cfg['n_kv']}, {spec.max_seq}, {cfg['hd']})"
        each = f"each tensor `(B, n_kv, max_seq_len, hd)` = `{shape}`"
        return wanted | {"kv_cache": Row(f"`list` of {layers} pairs `(k, v)`, {each}", BF16)}
    pages = f"= {2 * spec.batch * spec.pages_per_seq} "
    pools = f"`list` of {layers} tensors, each `(n_pages, n_kv, page_size, hd)`"
    return wanted | {
        "kv_cache": Row("`dict`", "see rows below", ("`k`, `v`, `page_table`, `page_size`",)),
        'kv_cache["k"]': Row(pools, BF16, (pages,)),
        'kv_cache["v"]': Row('same shape as `["k"]`', BF16),
        'kv_cache["page_table"]': Row("`(B, pages_per_seq)`", "`int32`, on the GPU"),
        'kv_cache["page_size"]': Row("scalar", INT, (f"`{cfg['page_size']}`",)),
    }


def violations(spec: MegaSpec) -> Iterator[str]:
    """Violations where the contract states something else."""
    table = rows(spec.contract_md)
    for argument, wanted in arguments(spec).items():
        if argument not in table:
            yield f"contract_md: expected a row of `{argument}`, got none"
            continue
        # A row of fewer cells lacks the last ones.
        _, shape, dtype, meaning, *_ = [*table[argument], "", "", ""]
        if shape != wanted.shape:
            yield f"contract_md: expected the shape {wanted.shape} of `{argument}`, got {shape}"
        if dtype != wanted.dtype:
            yield f"contract_md: expected the dtype {wanted.dtype} of `{argument}`, got {dtype}"
        for phrase in wanted.phrases:
            if phrase not in meaning:
                yield f"contract_md: expected {phrase} in the row of `{argument}`"
    if re.search(r"pos (?:<=|>=?) max_seq_len", spec.contract_md):
        yield "contract_md: expected pos < max_seq_len"
    for result in (f"`({spec.batch}, {spec.cfg['vocab']})`", "bf16 or fp32"):
        if result not in spec.contract_md.partition("**Return**")[2]:
            yield f"contract_md: expected {result} after **Return**"


def in_template(spec: MegaSpec) -> Iterator[str]:
    """A violation if the template's docstring has other arguments, besides its own, or types."""
    types = dict(re.findall(r"^\s*(\w+)\s*: (\w+)", spec.arg_doc, re.MULTILINE))
    wanted = {"weights": "dict", "kv_cache": "dict" if spec.kind == "paged" else "list"}
    if types != wanted:
        yield f"arg_doc: expected arguments of the types {wanted}, got {types}"
