# SPDX-License-Identifier: Apache-2.0
"""What a spec must satisfy: its sizes and figures, and that its texts state these."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from mega_factory.spec import BANDWIDTHS, VERIFY_STEPS, Figures, MegaSpec
from mega_factory.twins import CORRECT, DROPS

CFG_COUNTS = ("layers", "d", "ffn", "n_q", "n_kv", "hd", "vocab")
CFG_KEYS = {*CFG_COUNTS, "eps", "theta", "wdtype"}
CFG_OPTIONAL = {"page_size", "tied"}
TEXTS = (
    "title", "blurb", "arg_doc", "spec_md", "contract_md", "precision_md", "correctness_md",
    "regime_md",
)  # fmt: skip
FUNCTIONS = ("make_weights", "make_kv_cache", "build_model", "decode_step")

# The tolerance over the error of the worst correct implementation: less fails honest solutions on
# other tokens, more tests little. And the error of the closest wrong one over the tolerance.
FLOOR_MARGIN = (2, 4)
DROP_MARGIN = 1.5

# Neither part of a word, such as 2.2x, nor the end of a range, such as 0..128.
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w]|\.\d)")


def numbers(text: str) -> set[float]:
    """Every number in a text that stands alone."""
    return {float(number) for number in NUMBER.findall(text)}


def rows(contract_md: str) -> dict[str, str]:
    """The line of each argument of the contract's table, by its name in backticks."""
    lines = (line for line in contract_md.splitlines() if line.startswith("| `"))
    return {line.split("`")[1]: line for line in lines}


def violations(spec: MegaSpec) -> list[str]:
    """What is wrong with a spec, a sentence each: field, what was expected and what came."""
    found = [*_identity(spec), *_cfg(spec), *_lengths(spec)]
    if found:
        # Shapes, traffic and pages follow from these.
        return [*found, *_empty(spec)]
    checks = (_empty, _pages, _model, _contract, _regime, _floor, _figures, _tolerance)
    return [violation for check in checks for violation in check(spec)]


def _expect(field: str, expected: object, got: object) -> Iterator[str]:
    if expected != got:
        yield f"{field}: expected {expected}, got {got}"


def _identity(spec: MegaSpec) -> Iterator[str]:
    if not re.fullmatch(r"megakernel(-[a-z0-9]+)+", spec.name):
        yield f"name: expected megakernel-..., of lower case, digits and hyphens, got {spec.name!r}"
    if "megakernel" not in spec.keywords or len(set(spec.keywords)) < len(spec.keywords):
        yield f"keywords: expected megakernel among them, each once, got {spec.keywords}"
    if spec.gpu not in BANDWIDTHS:
        yield f"gpu: expected one of {', '.join(BANDWIDTHS)}, got {spec.gpu}"
    if unknown := set(spec.drops) - set(DROPS):
        yield f"drops: expected names of {', '.join(DROPS)}, got {', '.join(sorted(unknown))}"
    if not spec.drops:
        yield "drops: expected at least one, got none"


def _cfg(spec: MegaSpec) -> Iterator[str]:
    cfg = spec.cfg
    if missing := CFG_KEYS - set(cfg):
        yield f"cfg: expected also {', '.join(sorted(missing))}"
        return
    if unknown := set(cfg) - CFG_KEYS - CFG_OPTIONAL:
        yield f"cfg: expected nothing besides the document's keys, got {', '.join(sorted(unknown))}"
    for key in (*CFG_COUNTS, *(["page_size"] if "page_size" in cfg else [])):
        if type(cfg[key]) is not int or cfg[key] < 1:
            yield f"cfg[{key!r}]: expected a positive int, got {cfg[key]!r}"
            return
    if cfg["n_q"] % cfg["n_kv"]:
        yield f"cfg['n_q']: expected a multiple of n_kv = {cfg['n_kv']}, got {cfg['n_q']}"
    if cfg["hd"] % 2:
        yield f"cfg['hd']: expected an even number, rotated by pairs, got {cfg['hd']}"
    yield from _expect("cfg['wdtype']", "bf16", cfg["wdtype"])


def _lengths(spec: MegaSpec) -> Iterator[str]:
    counts = {"batch": spec.batch, "prefill_len": spec.prefill_len, "max_seq": spec.max_seq}
    for field, value in counts.items():
        if value < 1:
            yield f"{field}: expected a positive int, got {value}"
    if min(counts.values()) < 1:
        return
    if spec.decode_steps < VERIFY_STEPS:
        yield f"decode_steps: expected verify's {VERIFY_STEPS} or more, got {spec.decode_steps}"
    yield from _expect("prefill_lens: their number", spec.batch, len(spec.lens))
    yield from _expect("prefill_len: the most of prefill_lens", max(spec.lens), spec.prefill_len)
    if min(spec.lens) < 1:
        yield f"prefill_lens: expected positive ints, got {spec.lens}"
    if spec.prefill_lens and len(set(spec.prefill_lens)) == 1:
        yield "prefill_lens: expected different lengths, or none: prefill_len serves equal ones"
    if spec.prefill_len + spec.decode_steps > spec.max_seq:
        yield (
            f"max_seq: expected at least prefill_len + decode_steps ="
            f" {spec.prefill_len + spec.decode_steps}, got {spec.max_seq}"
        )


def _empty(spec: MegaSpec) -> Iterator[str]:
    for field in TEXTS:
        if not getattr(spec, field).strip():
            yield f"{field}: expected a text, got an empty one"


def _missing(field: str, text: str, wanted: dict[str, float]) -> Iterator[str]:
    """A violation for each figure, by its name, that a text does not state."""
    stated = numbers(text)
    for what, value in wanted.items():
        if not any(math.isclose(value, number, rel_tol=1e-9) for number in stated):
            yield f"{field}: expected it to state {what}, {value:g}"


def _pages(spec: MegaSpec) -> Iterator[str]:
    if spec.kind != "paged":
        return
    page_size, per_seq = spec.cfg["page_size"], spec.pages_per_seq
    if spec.max_seq % page_size:
        yield f"max_seq: expected a multiple of page_size = {page_size}, got {spec.max_seq}"
    wanted = {
        "the pages of a pool": 2 * spec.batch * per_seq,
        "the pages that this batch owns": spec.batch * per_seq,
        "the tokens of a page": page_size,
    }
    yield from _missing("spec_md", spec.spec_md, wanted)


def _model(spec: MegaSpec) -> Iterator[str]:
    for function in FUNCTIONS:
        if f"\ndef {function}(" not in spec.model_src:
            yield f"model_src: expected a function {function}, got none"
    if ("page_table" in spec.model_src) != (spec.kind == "paged"):
        yield f"model_src: expected the reference of a {spec.kind} cache, as cfg has it"


def _arguments(spec: MegaSpec) -> dict[str, list[str]]:
    """What the contract's row of each argument states."""
    cfg, layers = spec.cfg, spec.cfg["layers"]
    tensors = (
        "in_norm (d,)", "post_norm (d,)", "q (n_q*hd, d)", "k (n_kv*hd, d)", "v (n_kv*hd, d)",
        "o (d, n_q*hd)", "gate (ffn, d)", "up (ffn, d)", "down (d, ffn)",
    )  # fmt: skip
    wanted = {
        "weights": [f"{layers} dicts"],
        'weights["embed"]': [f"`({cfg['vocab']}, {cfg['d']})`"],
        'weights["final_norm"]': ["`(d,)`"],
        'weights["layers"][i]': [f"`{tensor}`" for tensor in tensors],
        "cfg": [key for key in cfg if key != "tied"],
        "max_seq_len": [f"`{spec.max_seq}`"],
        "token_ids": ["`(B,)`", "`int64`"],
        "pos": ["`(B,)`", "`int64`"] if spec.per_sequence_pos else ["scalar", "`int`"],
    }
    if not cfg.get("tied", True):
        wanted['weights["lm_head"]'] = [f"`({cfg['vocab']}, {cfg['d']})`"]
    if spec.kind == "contiguous":
        shape = f"({spec.batch}, {cfg['n_kv']}, {spec.max_seq}, {cfg['hd']})"
        return wanted | {"kv_cache": [f"{layers} pairs", f"`{shape}`"]}
    return wanted | {
        "kv_cache": ["`dict`", "`k`", "`v`", "`page_table`", "`page_size`"],
        'kv_cache["k"]': [
            f"{layers} tensors",
            "`(n_pages, n_kv, page_size, hd)`",
            f"= {2 * spec.batch * spec.pages_per_seq} ",
        ],
        'kv_cache["v"]': ['`["k"]`'],
        'kv_cache["page_table"]': ["`(B, pages_per_seq)`", "`int32`"],
        'kv_cache["page_size"]': [f"`{cfg['page_size']}`"],
    }


def _contract(spec: MegaSpec) -> Iterator[str]:
    table = rows(spec.contract_md)
    for argument, wanted in _arguments(spec).items():
        if argument not in table:
            yield f"contract_md: expected a row of `{argument}`, got none"
            continue
        for text in wanted:
            if text not in table[argument]:
                yield f"contract_md: expected {text} in the row of `{argument}`"
    result = f"`({spec.batch}, {spec.cfg['vocab']})`"
    if result not in spec.contract_md.partition("**Return**")[2]:
        yield f"contract_md: expected {result} after **Return**"


def _regime(spec: MegaSpec) -> Iterator[str]:
    cfg = spec.cfg
    wanted = {
        "batch": spec.batch,
        "prefill_len": spec.prefill_len,
        "decode_steps": spec.decode_steps,
        **{key: cfg[key] for key in CFG_COUNTS},
        "the floor in us": round(spec.floor_us()),
    }
    if spec.kind == "paged":
        wanted["page_size"] = cfg["page_size"]
    yield from _missing("regime_md", spec.regime_md, wanted)


def _floor(spec: MegaSpec) -> Iterator[str]:
    floor = round(spec.floor_us())
    if spec.perf_md.floor_us != floor:
        yield (
            f"perf_md: expected floor_us = {floor}: {spec.weight_bytes() / 1e9:.3f} GB of weights"
            f" and {spec.kv_bytes() / 1e6:.1f} MB of KV at {BANDWIDTHS[spec.gpu]} TB/s,"
            f" got {spec.perf_md.floor_us}"
        )
    gigabytes = float(f"{spec.weight_bytes() / 1e9:.3g}")
    megabytes = round(spec.kv_bytes() / 1e6)
    wanted = {"GB of weights": gigabytes, "MB of KV": megabytes, "the floor in us": floor}
    yield from _missing("perf_md", spec.perf_md.text, wanted)


def _figures(spec: MegaSpec) -> Iterator[str]:
    figures = spec.figures
    if figures is None:
        for field in ("eager_us", "graph_us"):
            yield from _expect(f"perf_md: {field}, unmeasured", None, getattr(spec.perf_md, field))
        yield from _expect("unfused_kernels, unmeasured", None, spec.unfused_kernels)
        return
    yield from _expect("unfused_kernels", figures.kernels, spec.unfused_kernels)
    yield from _expect("perf_md: eager_us", figures.eager_us, spec.perf_md.eager_us)
    graph_us = figures.busy_us if figures.graph_us is None else figures.graph_us
    yield from _expect("perf_md: graph_us", graph_us, spec.perf_md.graph_us)
    for us in (figures.eager_us, figures.busy_us, figures.graph_us):
        if us is not None and us < spec.floor_us():
            yield f"figures: expected no time below the floor of {spec.floor_us():.0f} us, got {us}"
    wanted = {f"the error of {name}": error for name, error in figures.errors.items()}
    wanted |= {f"the error of {name}": error for name, error in figures.drops.items()}
    yield from _missing("precision_md", spec.precision_md, wanted)


def _tolerance(spec: MegaSpec) -> Iterator[str]:
    yield from _missing("precision_md", spec.precision_md, {"tol": spec.tol})
    yield from _missing("correctness_md", spec.correctness_md, {"tol": spec.tol})
    for what, figures in (("claimed", spec.claimed), ("measured", spec.measured)):
        if figures is not None:
            yield from (f"tol: {what}: {text}" for text in _margins(spec, figures))


def _margins(spec: MegaSpec, figures: Figures) -> Iterator[str]:
    for field, names, wanted in (
        ("errors", figures.errors, CORRECT),
        ("drops", figures.drops, spec.drops),
    ):
        if missing := _absent(wanted, names):
            yield f"expected {field} of {missing}, got none"
            return
    low, high = (margin * figures.floor for margin in FLOOR_MARGIN)
    if not low <= spec.tol <= high:
        yield (
            f"expected {low:.3g} to {high:.3g}, {FLOOR_MARGIN[0]} to {FLOOR_MARGIN[1]} times the"
            f" error {figures.floor:g} of a correct implementation, got {spec.tol:g}"
        )
    for name in spec.drops:
        if figures.drops[name] < DROP_MARGIN * spec.tol:
            yield (
                f"expected at most {figures.drops[name] / DROP_MARGIN:.3g}, so that {name} with"
                f" an error of {figures.drops[name]:g} fails, got {spec.tol:g}"
            )
    if figures.paged_error:
        yield f"expected paged and contiguous to agree exactly, got {figures.paged_error:g}"


def _absent(wanted: Iterable[str], names: Iterable[str]) -> str:
    return ", ".join(sorted(set(wanted) - set(names)))
