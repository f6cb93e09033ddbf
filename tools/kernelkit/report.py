# SPDX-License-Identifier: Apache-2.0
"""Renders the benchmark tables of the docs from their JSON: ``python -m kernelkit.report FOLDER``.

With ``--check``, nothing is written, and the exit status is 1 if the page differs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelkit.results import Row, load, markdown

# Ops of each family in the order of the page; the first provider is the base of comparison.
TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "attn_decode": ("cudnn", "flash", "astrai", "astrai-serial"),
        "attn_paged_decode": (
            *("flashinfer", "astrai", "astrai-serial", "astrai-static", "astrai-capacity131072"),
        ),
        "attn_prefill": ("flash", "cudnn", "flashinfer", "astrai", "astrai-paged16"),
        "rotary_emb": ("torch", "astrai", "copy"),
        "host": ("torch", "astrai"),
    },
    "core": {"decode": ("torch", "astrai"), "decode_steps": ("torch", "astrai")},
    "gemv": {
        "bf16_gemv": ("cublas", "astrai", "astrai-static"),
        "bf16_swiglu": ("torch", "astrai", "astrai-static"),
        "add_rms_norm": ("torch", "astrai", "astrai-static"),
        "chain": ("cublas", "astrai", "astrai-static"),
        "host": ("cublas", "astrai"),
    },
}
HEAD = """# Benchmarks

Written by `python -m kernelkit.report docs/benchmarks` from the JSON beside it, which `nox -s
bench` writes on the GPU. Microseconds, medians. Device time is per node of a CUDA graph of at
least 32 calls over operands of more than 400 MB in all, or 512 sets of them after a flush (cold
L2), except `chain`, which is per decoder layer, `decode`, which is per step as the task's grader
times it, `decode_steps`, which is per step of many back to back, and `host`, which is the host
time of one eager call. `astrai-static` is `static_weights=True` or `static_cache=True`;
`astrai-serial` is without programmatic dependent launch; `astrai-capacity131072` is planned for
that many tokens; `copy` moves the same tensor and computes nothing.
"""


def speedup(rows: Sequence[Row], op: str, base: str, provider: str) -> float | None:
    """Geometric mean over cases of base's time over provider's."""
    times = {(row.case, row.provider): row.median_us for row in rows if row.op == op}
    ratios = [
        times[case, base] / time
        for (case, name), time in times.items()
        if name == provider and (case, base) in times
    ]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def render(folder: Path) -> str:
    """The page for all files ``folder/<gpu>/<family>.json``."""
    parts = [HEAD]
    for path in sorted(folder.glob("*/*.json")):
        rows = load(path)
        first = rows[0]
        parts.append(
            f"\n## {first.family} on {first.gpu}\n\n"
            f"torch {first.torch}, CUDA {first.cuda}, driver {first.driver}, {first.date[:10]}\n"
        )
        tables = TABLES[first.family]
        if unknown := {(r.op, r.provider) for r in rows if r.provider not in tables.get(r.op, ())}:
            raise ValueError(f"{path}: no place in the page for {sorted(unknown)}")
        for op, (base, *others) in tables.items():
            means = [(name, speedup(rows, op, base, name)) for name in others]
            said = ", ".join(f"`{name}` {mean:.2f}x" for name, mean in means if mean is not None)
            if not any(row.op == op for row in rows):
                continue
            parts.append(f"\n### {op}\n\n")
            if said:  # not every provider can be installed everywhere
                parts.append(f"Geometric mean against `{base}`: {said}\n\n")
            parts.append(markdown(rows, op, (base, *others)))
    return "".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    page, text = args.folder / "README.md", render(args.folder)
    if args.check:
        if page.read_text("utf-8") == text:
            return 0
        print(f"{page} is not what its JSON says: python -m kernelkit.report {args.folder}")
        return 1
    page.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
