# SPDX-License-Identifier: Apache-2.0
"""The rule of which image runs where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_core import arch


@pytest.mark.parametrize(
    ("capability", "image", "runs"),
    [
        ((8, 0), "80", True),
        ((8, 0), "86", False),
        ((8, 6), "80", True),
        ((8, 9), "86", True),
        ((8, 9), "89", True),
        ((9, 0), "80", False),
        ((9, 0), "90", True),
        ((9, 0), "90a", True),
        ((10, 0), "90a", False),
        ((10, 3), "100", True),
        ((10, 3), "100a", False),
        ((12, 0), "100", False),
    ],
)
def test_machine_code(capability: tuple[int, int], image: str, runs: bool) -> None:
    assert arch.runs_sass(capability, image) is runs


@pytest.mark.parametrize(
    ("capability", "image", "runs"),
    [
        ((7, 5), "80", False),
        ((8, 0), "80", True),
        ((8, 6), "89", False),
        ((9, 0), "80", True),
        ((12, 0), "89", True),
        ((9, 0), "90a", True),
        ((10, 0), "90a", False),
    ],
)
def test_ptx(capability: tuple[int, int], image: str, runs: bool) -> None:
    assert arch.runs_ptx(capability, image) is runs


@pytest.mark.parametrize("text", ["", "9", "sm_90", "90b", "9.0", "90aa"])
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a name such as '80' or '90a'"):
        arch.parse(text)


@given(st.integers(1, 20), st.integers(0, 9), st.booleans())
def test_a_name_says_what_it_was_made_of(major: int, minor: int, exact: bool) -> None:
    text = arch.name((major, minor)) + ("a" if exact else "")
    assert arch.parse(text) == ((major, minor), exact)
    assert arch.runs_sass((major, minor), text)
    assert arch.runs_ptx((major, minor), text)
    assert not arch.runs_sass((major + 1, minor), text)
    assert arch.runs_ptx((major + 1, minor), text) is not exact
