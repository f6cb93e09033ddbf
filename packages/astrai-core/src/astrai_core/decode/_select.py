# SPDX-License-Identifier: Apache-2.0
"""Selects the implementation of a handle: context > environment > measured table > torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from astrai_core import device, tables
from astrai_core.policy import TORCH, VARIABLES, mode, selected

from . import _composed, _megakernel
from ._arguments import Problem

__all__ = ["COMPOSED", "COMPOSED_KERNELS", "MEGAKERNEL", "Selection", "select", "supports"]

COMPOSED, MEGAKERNEL = "composed", "megakernel"
COMPOSED_KERNELS = _composed.KERNELS


_Question = Callable[[], tuple[Any, str | None]]
"""What an implementation is built of, and why it cannot decode, or None."""


class Selection(NamedTuple):
    """What is to decode.

    Attributes:
        chosen: ``torch``, ``composed`` or ``megakernel``.
        passed_over: why the others do not.
        package: the functions of the megakernel's package, where it is chosen.
    """

    chosen: str
    passed_over: Mapping[str, str]
    package: Any = None


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
    questions: dict[str, _Question] = {
        COMPOSED: lambda: (None, _composed.obstacle(problem)),
        MEGAKERNEL: lambda: _megakernel.obstacle(problem, cfg),
    }
    if name is not None:
        package, obstacle = questions[name]()
        if obstacle is None:
            others = (other for other in (TORCH, COMPOSED, MEGAKERNEL) if other != name)
            return Selection(name, dict.fromkeys(others, why.format(name)), package)
        if demanded is not None:
            raise RuntimeError(f"decode: {name} is demanded by use(): {obstacle}")
        other = MEGAKERNEL if name == COMPOSED else COMPOSED
        return Selection(TORCH, {name: obstacle, other: why.format(name)})
    return _by_table(problem, questions)


def supports(
    weights: Mapping[str, Any], kv_cache: Any, cfg: Mapping[str, Any], max_seq_len: int
) -> bool:
    """Whether the megakernel is there for arguments of `build_model`, and takes them."""
    return _megakernel.obstacle(Problem.parse(weights, kv_cache, cfg, max_seq_len), cfg)[1] is None


def _by_table(problem: Problem, questions: dict[str, _Question]) -> Selection:
    """The first row of the table that covers the problem and whose implementation can serve it."""
    passed_over: dict[str, str] = {}
    rows, where = _rows(problem)
    for row in rows:
        if row.implementation in passed_over:
            continue
        package, obstacle = questions[row.implementation]()
        if obstacle is None:
            names = (n for n in (TORCH, COMPOSED, MEGAKERNEL) if n != row.implementation)
            why = f"the measured table prefers {row.implementation}"
            others = {name: passed_over.get(name, why) for name in names}
            return Selection(row.implementation, others, package)
        passed_over[row.implementation] = obstacle
    # Nobody wants it to decode, so that its package is not asked what it supports.
    questions[MEGAKERNEL] = lambda: _megakernel.package_for(problem)
    for name, question in questions.items():
        if name not in passed_over:
            passed_over[name] = question()[1] or (
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
