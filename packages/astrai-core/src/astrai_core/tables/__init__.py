# SPDX-License-Identifier: Apache-2.0
"""Measured tables: for which calls an implementation is the fastest correct one, per architecture.

A table is a JSON file ``sm_<arch>.json``: ``{"arch": ..., "rows": [...]}``. A row names an op, an
implementation, the bands of M, N and K that it holds for (inclusive ``[low, high]``, high may be
null), optionally ``k_multiple_of``, and the measurement behind it. What no row covers is torch's.
Of the op ``decode`` M is the batch, N the tokens that a sequence may reach, K the model's width;
where several rows cover a call, the first implementation that supports it is chosen.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

_KEYS = {"op", "implementation", "m", "n", "k", "k_multiple_of", "evidence"}
_REQUIRED = {"op", "implementation", "m", "evidence"}
# What an architecture without a table of its own takes over from the nearest lower one.
_INHERITED_OP, _INHERITED_M = "linear", (2, 4)


@dataclass(frozen=True)
class Row:
    """For calls within all bands, `implementation` is the fastest correct one."""

    op: str
    implementation: str
    m: tuple[int, int | None]
    n: tuple[int, int | None]
    k: tuple[int, int | None]
    k_multiple_of: int
    evidence: str

    def covers(self, m: int, n: int, k: int) -> bool:
        """Whether a call of these sizes is within the bands."""
        bands = ((self.m, m), (self.n, n), (self.k, k))
        return k % self.k_multiple_of == 0 and all(
            low <= value and (high is None or value <= high) for (low, high), value in bands
        )


def parse(text: str, origin: str) -> tuple[Row, ...]:
    """The rows of a table.

    Raises:
        ValueError: the text is no table; `origin` and the row are named.
    """
    try:
        rows = json.loads(text)["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{origin}: expected an object with a list 'rows', got {error!r}"
        ) from error
    if type(rows) is not list:
        raise ValueError(f"{origin}: expected an object with a list 'rows', got {rows!r}")
    return tuple(_row(row, f"{origin}: row {number}") for number, row in enumerate(rows, 1))


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, dict) or not _REQUIRED <= row.keys() <= _KEYS:
        found = sorted(row) if isinstance(row, dict) else row
        raise ValueError(f"{where}: expected {sorted(_REQUIRED)} of {sorted(_KEYS)}, got {found}")
    for key in ("op", "implementation", "evidence"):
        if not isinstance(row[key], str) or not row[key]:
            raise ValueError(f"{where}: {key}: expected a non-empty string, got {row[key]!r}")
    multiple = row.get("k_multiple_of", 1)
    if type(multiple) is not int or multiple < 1:
        raise ValueError(f"{where}: k_multiple_of: expected a positive integer, got {multiple!r}")
    m, n, k = (_band(row.get(key, [1, None]), f"{where}: {key}") for key in ("m", "n", "k"))
    return Row(row["op"], row["implementation"], m, n, k, multiple, row["evidence"])


def _band(value: Any, where: str) -> tuple[int, int | None]:
    if isinstance(value, list) and len(value) == 2:
        low, high = value
        if type(low) is int and (high is None or (type(high) is int and high >= low)) and low >= 1:
            return low, high
    raise ValueError(f"{where}: expected [low, high] with 1 <= low <= high or null, got {value!r}")


@functools.cache
def available() -> dict[tuple[int, int], tuple[Row, ...]]:
    """Every table of the package, by compute capability."""
    found = {}
    for file in resources.files(__name__).iterdir():
        match = re.fullmatch(r"sm_(\d+)(\d)\.json", file.name)
        if match:
            found[int(match[1]), int(match[2])] = parse(file.read_text("utf-8"), file.name)
    return found


@functools.cache
def rows_for(capability: tuple[int, int]) -> tuple[Row, ...]:
    """The rows that hold on a device.

    An architecture without a table uses the nearest lower one for linears of M 2 to 4, and torch
    for everything else.
    """
    tables = available()
    if capability in tables:
        return tables[capability]
    lower = [known for known in tables if known < capability]
    if not lower:
        return ()
    nearest = max(lower)
    inherited = []
    for row in tables[nearest]:
        low = max(row.m[0], _INHERITED_M[0])
        high = _INHERITED_M[1] if row.m[1] is None else min(row.m[1], _INHERITED_M[1])
        if row.op == _INHERITED_OP and low <= high:
            evidence = f"taken over from sm_{nearest[0]}{nearest[1]}: {row.evidence}"
            inherited.append(
                Row(
                    row.op,
                    row.implementation,
                    (low, high),
                    row.n,
                    row.k,
                    row.k_multiple_of,
                    evidence,
                )
            )
    return tuple(inherited)
