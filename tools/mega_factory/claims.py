# SPDX-License-Identifier: Apache-2.0
"""The figures that a spec claims by its own fields and texts, where it names no others."""

from __future__ import annotations

import re

from mega_factory.spec import Figures, MegaSpec
from mega_factory.twins import CORRECT

NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"


def table_of(precision_md: str) -> tuple[list[float], list[float]]:
    """The errors in the table of a text: those above the row of the gate, and those below."""
    above, _, below = precision_md.partition("(the gate)")
    row = re.compile(rf"^\|.*\| \**{NUMBER}\** \|$", re.MULTILINE)
    right, wrong = ([float(cell) for cell in row.findall(part)] for part in (above, below))
    return right, wrong


def stated(spec: MegaSpec) -> Figures | None:
    """The claims of a spec; None unless it states kernels, the eager time and the bar's.

    Rows above the gate are of `twins.CORRECT` and those below of `spec.dropped`, in that order.
    The bar is the time of a CUDA graph if it is named so, else the GPU-busy part.
    """
    kernels, perf = spec.unfused_kernels, spec.perf_md
    if kernels is None or perf.eager_us is None or perf.graph_us is None:
        return None
    right, wrong = table_of(spec.precision_md)
    steps, seeds = (
        re.search(pattern, spec.precision_md)
        for pattern in (r"(\d+)\s+consecutive", r"(\d+)\s+(?:weight/token\s+)?seeds")
    )
    agree = re.search(rf"agree to a relative error of \**{NUMBER}", spec.precision_md)
    is_graph = "graph" in perf.bar.lower()
    return Figures(
        measured_on="claimed, not measured here",
        kernels=kernels,
        eager_us=perf.eager_us,
        busy_us=None if is_graph else perf.graph_us,
        graph_us=perf.graph_us if is_graph else None,
        errors=dict(zip(CORRECT, right, strict=False)),
        drops=dict(zip(spec.dropped, wrong, strict=False)),
        paged_error=float(agree[1]) if agree else None,
        steps=int(steps[1]) if steps else 0,
        seeds=int(seeds[1]) if seeds else 0,
    )
