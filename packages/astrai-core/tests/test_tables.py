# SPDX-License-Identifier: Apache-2.0
"""Tables as data: schema, bands, and what an architecture without one uses."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest

from astrai_core import arch, policy, tables
from astrai_core.tables import Row, parse, rows_for

SHIPPED = sorted(
    file.name for file in resources.files(tables).iterdir() if file.name.endswith(".json")
)
ROW: dict[str, Any] = {
    "op": "linear",
    "implementation": "gemv",
    "m": [1, 8],
    "evidence": "measured",
}


def table(*rows: Any) -> str:
    return json.dumps({"arch": "sm_90", "rows": rows})


def row(op: str = "linear", m: tuple[int, int | None] = (1, 8), **changes: Any) -> Row:
    bands: dict[str, Any] = {"n": (1, None), "k": (1, None), "k_multiple_of": 1, **changes}
    return Row(op, "gemv", m, evidence="measured", **bands)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], tuple[Row, ...]]:
    """What counts as shipped; to be filled by the test."""
    known: dict[tuple[int, int], tuple[Row, ...]] = {}
    monkeypatch.setattr(tables, "available", lambda: known)
    # The cached answers are of the real tables.
    monkeypatch.setattr(tables, "rows_for", tables.rows_for.__wrapped__)
    return known


def test_there_are_tables() -> None:
    assert {"sm_80.json", "sm_89.json", "sm_90.json"} <= {*SHIPPED}
    assert len(tables.available()) == len(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_names_known_ops_and_its_own_architecture(name: str) -> None:
    text = (resources.files(tables) / name).read_text("utf-8")
    rows = parse(text, name)
    declared = json.loads(text)["arch"]
    assert name == f"{declared}.json"
    capability, _ = arch.parse(declared.removeprefix("sm_"))
    assert rows_for(capability) == rows and rows
    for found in rows:
        assert found.implementation in policy._CHOICES[found.op]
        assert found.m[0] >= 1 and found.m[1] is not None and found.m[1] <= 8


def test_a_row_has_open_bands_by_default() -> None:
    assert parse(table(ROW), "t") == (row(),)
    full = {**ROW, "n": [16, 32], "k": [64, None], "k_multiple_of": 8}
    assert parse(table(ROW, full), "t")[1] == row(n=(16, 32), k=(64, None), k_multiple_of=8)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"arch": "sm_90"}', '{"rows": null}', '{"rows": {}}']
)
def test_a_text_that_is_no_table(text: str) -> None:
    with pytest.raises(ValueError, match=r"sm_1\.json: expected an object with a list 'rows'"):
        parse(text, "sm_1.json")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], r"expected \['evidence', 'implementation', 'm', 'op'\] of .*, got \[\]"),
        ("linear", "expected .* got linear"),
        ({key: ROW[key] for key in ("op", "implementation", "m")}, "expected .*'evidence'"),
        ({**ROW, "q": [1, 2]}, "expected .* got .*'q'"),
        ({**ROW, "op": ""}, "op: expected a non-empty string, got ''"),
        ({**ROW, "implementation": 3}, "implementation: expected a non-empty string, got 3"),
        ({**ROW, "evidence": None}, "evidence: expected a non-empty string, got None"),
        ({**ROW, "k_multiple_of": 0}, "k_multiple_of: expected a positive integer, got 0"),
        ({**ROW, "k_multiple_of": True}, "k_multiple_of: expected a positive integer, got True"),
        ({**ROW, "m": 4}, "m: expected .* got 4"),
        ({**ROW, "m": [4]}, r"m: expected .* got \[4\]"),
        ({**ROW, "m": [0, 4]}, r"m: expected \[low, high\] with 1 <= low"),
        ({**ROW, "n": [8, 4]}, r"n: expected .* got \[8, 4\]"),
        ({**ROW, "k": [None, 4]}, r"k: expected .* got \[None, 4\]"),
        ({**ROW, "k": [1, 4.0]}, r"k: expected .* got \[1, 4\.0\]"),
    ],
)
def test_a_wrong_row_is_named(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"sm_90\.json: row 2: {message}"):
        parse(table(ROW, wrong), "sm_90.json")


@pytest.mark.parametrize(
    ("sizes", "covered"),
    [
        ((2, 16, 64), True),
        ((4, 32, 64), True),
        ((2, 16, 1 << 40), True),
        ((1, 16, 64), False),
        ((5, 16, 64), False),
        ((2, 15, 64), False),
        ((2, 33, 64), False),
        ((2, 16, 56), False),
        ((2, 16, 68), False),
    ],
)
def test_bands_include_their_ends(sizes: tuple[int, int, int], covered: bool) -> None:
    bands = row(m=(2, 4), n=(16, 32), k=(64, None), k_multiple_of=8)
    assert bands.covers(*sizes) is covered


def test_an_architecture_with_a_table_uses_it_alone(
    shipped: dict[tuple[int, int], tuple[Row, ...]],
) -> None:
    shipped[8, 0] = (row(m=(2, 4)),)
    shipped[9, 0] = (row("swiglu"), row(m=(1, 1)))
    assert tables.rows_for((9, 0)) == (row("swiglu"), row(m=(1, 1)))
    shipped[9, 0] = ()
    assert tables.rows_for((9, 0)) == ()


@pytest.mark.parametrize(
    ("m", "inherited"),
    [((1, 8), (2, 4)), ((3, 8), (3, 4)), ((1, 2), (2, 2)), ((1, None), (2, 4))],
)
def test_another_architecture_inherits_linears_of_2_to_4_tokens(
    shipped: dict[tuple[int, int], tuple[Row, ...]],
    m: tuple[int, int | None],
    inherited: tuple[int, int],
) -> None:
    shipped[8, 9] = (row(m=m, n=(16, 32), k=(64, None), k_multiple_of=8), row("swiglu", m))
    (found,) = tables.rows_for((9, 0))
    assert found.op == "linear" and found.m == inherited
    assert (found.n, found.k, found.k_multiple_of) == ((16, 32), (64, None), 8)
    assert found.evidence == "taken over from sm_89: measured"


@pytest.mark.parametrize("m", [(1, 1), (5, 8), (5, None)])
def test_bands_outside_2_to_4_tokens_are_not_inherited(
    shipped: dict[tuple[int, int], tuple[Row, ...]], m: tuple[int, int | None]
) -> None:
    shipped[8, 9] = (row(m=m),)
    assert tables.rows_for((9, 0)) == ()


def test_the_nearest_lower_table_counts(
    shipped: dict[tuple[int, int], tuple[Row, ...]],
) -> None:
    for capability in ((9, 0), (8, 0), (8, 9)):
        n = capability[0] * 10 + capability[1]
        shipped[capability] = (row(m=(2, 4), n=(n, n)),)
    for capability, n in (((8, 6), 80), ((8, 9), 89), ((8, 10), 89), ((12, 0), 90)):
        assert [found.n for found in tables.rows_for(capability)] == [(n, n)]


def test_nothing_is_lower_than_the_first_table() -> None:
    for capability in ((5, 0), (7, 5)):
        assert rows_for(capability) == ()
    assert all(found.op == "linear" and found.m == (2, 4) for found in rows_for((12, 0)))
    assert rows_for((12, 0))
