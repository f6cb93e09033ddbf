# SPDX-License-Identifier: Apache-2.0
"""A spec as the document has it: its file names no measurement."""

import dataclasses

import pytest

from mega_factory.models import paged
from mega_factory.render import figures_md, spec_json
from mega_factory.spec import MegaSpec, SpecError
from mega_factory.specs import load
from mega_factory.specs._common import LLAMA_1B, perf_md

DOCUMENT = load("megakernel-gqa-paged-decode")


def text(old, new):
    assert old in DOCUMENT.precision_md
    return {"precision_md": DOCUMENT.precision_md.replace(old, new)}


def as_in_the_document(**changes):
    """The spec by the keywords of the document's own file, which names no measurement."""
    fields = {
        "name": "megakernel-gqa-paged-decode", "unfused_kernels": 772, "title": DOCUMENT.title,
        "blurb": DOCUMENT.blurb, "keywords": DOCUMENT.keywords,
        "cfg": LLAMA_1B | {"page_size": 128}, "model_src": paged.MODEL_SRC, "batch": 1,
        "prefill_len": 16384, "max_seq": 16512, "decode_steps": 32, "tol": 6e-2,
        "arg_doc": DOCUMENT.arg_doc, "spec_md": DOCUMENT.spec_md,
        "contract_md": DOCUMENT.contract_md, "precision_md": DOCUMENT.precision_md,
        "correctness_md": DOCUMENT.correctness_md,
        "perf_md": perf_md(
            floor_us=627, eager_us=10764, graph_us=6296, graph_label="eager torch, GPU busy only",
            bar="GPU-busy", lead=DOCUMENT.perf_md.lead,
            extra=DOCUMENT.perf_md.extra,
        ),
        "regime_md": DOCUMENT.regime_md,
    }  # fmt: skip
    return MegaSpec(**(fields | changes))


def test_the_documents_own_file_is_valid_and_what_it_states_are_claims():
    spec = as_in_the_document().validate()
    expected = dataclasses.replace(DOCUMENT.claimed, measured_on="claimed, not measured here")
    assert spec.claims == spec.figures == expected
    assert spec.dropped == DOCUMENT.drops and spec.note is None
    assert spec_json(spec)["baselines"] == {"eager_us": 10764, "busy_us": 6296, "graph_us": None}
    assert "Not yet measured with the fixtures" in figures_md(spec)


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"tol": 0.08}, "tol: claimed: expected at most 0.0713, so that never_append"),
        (
            text("| 2.77e-2 |", "| 2.9e-2 |"),
            "precision_md: expected 0.029 in 'E = 2.8e-2'",
        ),
        (
            text("7.6e-1**", "a lot**"),
            "tol: claimed: expected drops of ignore_table, got none",
        ),
        (
            {"perf_md": dataclasses.replace(DOCUMENT.perf_md, graph_us=1.0)},
            "figures: expected no time below the floor of 627 us, got 1.0",
        ),
        ({"unfused_kernels": None}, "perf_md: eager_us, unmeasured: expected None, got 10764"),
    ],
)
def test_claims_of_a_text_are_checked(changes, violation):
    with pytest.raises(SpecError) as caught:
        as_in_the_document(**changes).validate()
    assert any(violation in found for found in caught.value.violations), caught.value


def test_a_claimed_graph_leaves_the_busy_time_open():
    perf = dataclasses.replace(DOCUMENT.perf_md, bar="CUDA graph")
    text = DOCUMENT.precision_md.replace("agree to a relative error of", "agree to")
    spec = as_in_the_document(perf_md=perf, precision_md=text).validate()
    claims = spec.claims
    assert (claims.busy_us, claims.graph_us, claims.paged_error) == (None, 6296, None)
    assert "| of that, GPU busy |  |\n" in figures_md(spec)
