# SPDX-License-Identifier: Apache-2.0
"""Values of wrong types in a spec are violations like others."""

import dataclasses
import math

import pytest

from mega_factory.spec import MegaSpec, SpecError
from mega_factory.specs import load

DOCUMENT = load("megakernel-gqa-paged-decode")
FIELDS = [field.name for field in dataclasses.fields(MegaSpec)]


def violations_of(**changes):
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(DOCUMENT, **changes).validate()
    return caught.value.violations


def cfg(**changes):
    return {"cfg": DOCUMENT.cfg | changes}


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"batch": None}, "batch: expected int, got None"),
        ({"batch": True}, "batch: expected int, got True"),
        ({"decode_steps": None}, "decode_steps: expected int, got None"),
        ({"max_seq": "x"}, "max_seq: expected int, got 'x'"),
        ({"tol": "6e-2"}, "tol: expected float, got '6e-2'"),
        ({"tol": math.nan}, "tol: expected float, got nan"),
        ({"tol": 0}, "tol: expected a positive number, got 0"),
        ({"blurb": None}, "blurb: expected str, got None"),
        ({"keywords": ["megakernel", 1]}, "keywords: expected list[str], got ['megakernel', 1]"),
        ({"prefill_lens": ["a"]}, "prefill_lens: expected list[int] | None, got ['a']"),
        (cfg(theta="abc"), "cfg['theta']: expected a positive number, got 'abc'"),
        (cfg(theta=0), "cfg['theta']: expected a positive number, got 0"),
        (cfg(eps=None), "cfg['eps']: expected a positive number, got None"),
        (cfg(eps=math.inf), "cfg['eps']: expected a positive number, got inf"),
        (cfg(page_size=None), "cfg['page_size']: expected a positive int, got None"),
        (
            {"perf_md": dataclasses.replace(DOCUMENT.perf_md, eager_us="1")},
            "perf_md.eager_us: expected float | None, got '1'",
        ),
        (
            {"claimed": dataclasses.replace(DOCUMENT.claimed, errors={"all_fp32": None})},
            "claimed.errors: expected dict[str, float], got {'all_fp32': None}",
        ),
    ],
)
def test_a_wrong_type_is_a_violation(changes, violation):
    assert violations_of(**changes) == [violation]


def test_a_head_that_may_be_tied():
    assert "cfg['tied']: expected a bool, got 'no'" in violations_of(**cfg(tied="no"))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [1j, [None], {1: 2}, -1, "", 1.5, math.nan, b"x"])
def test_no_value_ends_in_another_error(field, value):
    assert any(text.startswith(field) for text in violations_of(**{field: value}))


@pytest.mark.parametrize("field", FIELDS)
def test_a_spec_of_nothing_but_wrong_types(field):
    found = violations_of(**dict.fromkeys(FIELDS, 1j))
    assert len(found) == len(FIELDS) and any(text.startswith(f"{field}: ") for text in found)


def test_a_wrong_type_hides_no_other_violation():
    found = violations_of(
        batch=None, decode_steps=1, name="Decode", blurb=None, title=" ", precision_md=0, tol=0.5
    )
    for text in (
        "batch: expected int", "decode_steps: expected at least", "name: expected megakernel-",
        "blurb: expected str", "title: expected a text", "precision_md: expected str",
        "tol: claimed: expected 0.0554", "correctness_md: expected it to state 'at most **0.5**'",
    ):  # fmt: skip
        assert any(line.startswith(text) for line in found), text


def test_a_floor_of_zero_is_a_violation():
    perf = dataclasses.replace(DOCUMENT.perf_md, floor_us=0)
    (found,) = violations_of(perf_md=perf)
    assert found.startswith("perf_md: expected floor_us = 627: ")
