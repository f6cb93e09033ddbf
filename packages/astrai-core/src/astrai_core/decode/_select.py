# SPDX-License-Identifier: Apache-2.0
"""Selects the implementation of a handle: context > environment > measured table > torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from astrai_core import device, tables
from astrai_core.policy import TORCH, VARIABLES, OpSpec, kernel_for, mode, selected

from . import _composed
from ._arguments import Problem

__all__ = ["COMPOSED", "MEGAKERNEL", "Selection", "select"]

COMPOSED, MEGAKERNEL = "composed", "megakernel"


class Selection(NamedTuple):
    """What is to decode.

    Attributes:
        chosen: ``torch``, ``composed`` or ``megakernel``.
        passed_over: why the others do not.
        megakernel: `build_model`, `decode_step` and `teardown` of the package, where it is chosen.
    """

    chosen: str
    passed_over: Mapping[str, str]
    megakernel: Any = None


def select(problem: Problem, cfg: Mapping[str, Any]) -> Selection:
    """The implementation for a problem.

    Raises:
        RuntimeError: `use` demands one that cannot serve it.
        ValueError: ``ASTRAI_DECODE`` has a value that is none.
    """
    variable = VARIABLES["decode"][0]
    demanded, wanted = selected("decode"), mode("decode")
    name = demanded or (wanted if wanted != "auto" else None)
    why = "use() demands {}" if demanded else f"{variable}={{}}"
    if name == TORCH:
        return Selection(TORCH, dict.fromkeys((COMPOSED, MEGAKERNEL), why.format(TORCH)))
    obstacles: dict[str, Callable[[], tuple[str | None, Any]]] = {
        COMPOSED: lambda: (_composed.obstacle(problem), None),
        MEGAKERNEL: lambda: _megakernel(problem, cfg),
    }
    if name is not None:
        obstacle, package = obstacles[name]()
        if obstacle is None:
            others = (other for other in (TORCH, COMPOSED, MEGAKERNEL) if other != name)
            return Selection(name, dict.fromkeys(others, why.format(name)), package)
        if demanded is not None:
            raise RuntimeError(f"decode: {name} is demanded by use(): {obstacle}")
        other = MEGAKERNEL if name == COMPOSED else COMPOSED
        return Selection(TORCH, {name: obstacle, other: why.format(name)})
    return _by_table(problem, obstacles)


def _by_table(
    problem: Problem, obstacles: Mapping[str, Callable[[], tuple[str | None, Any]]]
) -> Selection:
    """The first row of the table that covers the problem and whose implementation can serve it."""
    passed_over: dict[str, str] = {}
    rows, where = _rows(problem)
    for row in rows:
        if row.implementation in passed_over:
            continue
        obstacle, package = obstacles[row.implementation]()
        if obstacle is None:
            names = (n for n in (TORCH, COMPOSED, MEGAKERNEL) if n != row.implementation)
            why = f"the measured table prefers {row.implementation}"
            others = {name: passed_over.get(name, why) for name in names}
            return Selection(row.implementation, others, package)
        passed_over[row.implementation] = obstacle
    for name, question in obstacles.items():
        if name not in passed_over:
            passed_over[name] = question()[0] or (
                f"no measurement {where} prefers it ({VARIABLES['decode'][0]}={name} forces it)"
            )
    return Selection(TORCH, passed_over)


def _rows(problem: Problem) -> tuple[list[tables.Row], str]:
    """The table's rows that cover a problem; and its GPU in words."""
    capability = device.capability(problem.gpu)
    if capability is None:
        return [], "on this device"
    sizes = problem.cache.batch, problem.max_seq_len, problem.config.d
    rows = [row for row in tables.rows_for(capability) if row.op == "decode" and row.covers(*sizes)]
    return rows, f"on sm_{capability[0]}{capability[1]}"


def _megakernel(problem: Problem, cfg: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Why the megakernel cannot serve a problem, and its functions where it can."""
    if problem.gpu < 0:
        return "the weights are not on a CUDA device", None
    spec = OpSpec("decode", MEGAKERNEL, "decode", VARIABLES["decode"][0])
    package: Any
    package, why = kernel_for(spec, problem.gpu)
    if package is None:
        return why, None
    kind = "contiguous" if problem.cache.table is None else "paged"
    why = package.unsupported(dict(cfg), problem.cache.batch, problem.max_seq_len, kind)
    return why, package
