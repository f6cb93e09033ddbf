# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json

import pytest

from mega_factory import spec as spec_module
from mega_factory.models import contiguous
from mega_factory.spec import Figures, SpecError
from mega_factory.specs import load, load_all
from mega_factory.validation import numbers

DOCUMENT = load("megakernel-gqa-paged-decode")
BATCH = load("megakernel-gqa-paged-decode-batch8")
FIGURES = dataclasses.replace(DOCUMENT.claimed, measured_on="NVIDIA H200")


def violations_of(spec, **changes):
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(spec, **changes).validate()
    return caught.value.violations


def swapped(field, old, new):
    text = getattr(DOCUMENT, field)
    assert old in text
    return {field: text.replace(old, new)}


def perf(**changes):
    return {"perf_md": dataclasses.replace(DOCUMENT.perf_md, **changes)}


def claimed(**changes):
    return {"claimed": dataclasses.replace(DOCUMENT.claimed, **changes)}


def measured(**changes):
    return {"measured": dataclasses.replace(FIGURES, **changes)}


def test_every_spec_is_valid():
    assert len(load_all()) == 4
    for spec in load_all().values():
        assert spec.validate() is spec


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"name": "Decode"}, "name: expected megakernel-..., of lower case"),
        ({"keywords": ["decode"]}, "keywords: expected megakernel among them"),
        ({"gpu": "b300"}, "gpu: expected one of h200, got b300"),
        ({"drops": ["forget"]}, "drops: expected names of never_append"),
        ({"drops": []}, "drops: expected at least one"),
        ({"cfg": {"layers": 16}}, "cfg: expected also d, eps, ffn"),
        ({"cfg": DOCUMENT.cfg | {"experts": 8}}, "cfg: expected nothing besides"),
        ({"cfg": DOCUMENT.cfg | {"ffn": 0}}, "cfg['ffn']: expected a positive int, got 0"),
        ({"cfg": DOCUMENT.cfg | {"n_q": 30}}, "cfg['n_q']: expected a multiple of n_kv = 8"),
        ({"cfg": DOCUMENT.cfg | {"hd": 63}}, "cfg['hd']: expected an even number"),
        ({"cfg": DOCUMENT.cfg | {"wdtype": "fp8"}}, "cfg['wdtype']: expected bf16, got fp8"),
        ({"batch": 0}, "batch: expected a positive int, got 0"),
        ({"decode_steps": 1}, "decode_steps: expected verify's 8 or more, got 1"),
        ({"decode_steps": 129}, "max_seq: expected at least prefill_len + decode_steps = 16513"),
        ({"max_seq": 16500}, "max_seq: expected a multiple of page_size = 128, got 16500"),
        ({"prefill_lens": [1, 16384]}, "prefill_lens: their number: expected 1, got 2"),
        ({"prefill_lens": [9]}, "prefill_len: the most of prefill_lens: expected 9, got 16384"),
        ({"title": " "}, "title: expected a text"),
        ({"max_seq": 16640}, "spec_md: expected it to state the pages of a pool, 260"),
        ({"max_seq": 16640}, 'contract_md: expected = 260  in the row of `kv_cache["k"]`'),
        ({"model_src": contiguous.MODEL_SRC}, "model_src: expected the reference of a paged cache"),
        ({"model_src": ""}, "model_src: expected a function build_model, got none"),
        (swapped("contract_md", "16 dicts", "15 dicts"), "expected 16 dicts in the row"),
        (swapped("contract_md", "`gate (ffn, d)`, ", ""), "`gate (ffn, d)` in the row of"),
        (swapped("contract_md", "| `token_ids`", "| `ids`"), "expected a row of `token_ids`"),
        (swapped("contract_md", "(1, 128256)", "(1, 128)"), "`(1, 128256)` after **Return**"),
        (swapped("regime_md", "ffn=8192", "ffn=8191"), "regime_md: expected it to state ffn, 8192"),
        (swapped("regime_md", "627", "628"), "expected it to state the floor in us, 627"),
        (perf(floor_us=600), "perf_md: expected floor_us = 627: 2.472 GB of weights and 537.9 MB"),
        (perf(text="slow"), "perf_md: expected it to state MB of KV, 538"),
        (perf(eager_us=1.0), "perf_md: eager_us: expected 10764, got 1.0"),
        (perf(graph_us=1.0), "perf_md: graph_us: expected 6296, got 1.0"),
        ({"unfused_kernels": 770}, "unfused_kernels: expected 772, got 770"),
        ({"cfg": DOCUMENT.cfg | {"page_size": 0}}, "cfg['page_size']: expected a positive int"),
        (claimed(busy_us=600), "figures: expected no time below the floor of 627 us, got 600"),
        (claimed(errors={"all_fp32": 0.0277}), "tol: claimed: expected errors of fp32_residual"),
        (claimed(drops={"never_append": 0.107}), "tol: claimed: expected drops of ignore_table"),
        (claimed(paged_error=1e-9), "expected paged and contiguous to agree exactly, got 1e-09"),
        (
            swapped("precision_md", "1.07e-1", "1.7e-1"),
            "precision_md: expected it to state the error of never_append, 0.107",
        ),
        (swapped("precision_md", "6e-2", "5e-2"), "precision_md: expected it to state tol, 0.06"),
        (swapped("correctness_md", "0.06", "0.05"), "correctness_md: expected it to state tol"),
        ({"tol": 0.05}, "tol: claimed: expected 0.0554 to 0.111, 2 to 4 times the error 0.0277"),
        ({"tol": 0.08}, "tol: claimed: expected at most 0.0713, so that never_append"),
        (
            measured(drops=FIGURES.drops | {"ignore_table": 0.07}),
            "tol: measured: expected at most 0.0467, so that ignore_table",
        ),
        (
            measured(errors=dict.fromkeys(FIGURES.errors, 0.04)),
            "tol: measured: expected 0.08 to 0.16, 2 to 4 times the error 0.04",
        ),
    ],
)
def test_a_violation_is_named(changes, violation):
    assert any(violation in found for found in violations_of(DOCUMENT, **changes))


def test_all_violations_are_listed_at_once():
    changes = {"unfused_kernels": 1, **perf(floor_us=1), **swapped("regime_md", "8192", "1")}
    with pytest.raises(ValueError, match=DOCUMENT.name) as caught:
        dataclasses.replace(DOCUMENT, tol=0.5, **changes).validate()
    for field in ("unfused_kernels", "perf_md", "regime_md", "tol", "precision_md"):
        assert f"\n  {field}: " in str(caught.value)


def test_lengths_per_sequence_need_positions_per_sequence():
    row = next(r for r in DOCUMENT.contract_md.splitlines() if r.startswith("| `pos`"))
    lines = BATCH.contract_md.splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith("| `pos`"))
    lines[index] = row
    found = violations_of(BATCH, contract_md="\n".join(lines))
    assert found == [
        "contract_md: expected `(B,)` in the row of `pos`",
        "contract_md: expected `int64` in the row of `pos`",
    ]
    assert any(
        "different lengths" in text for text in violations_of(BATCH, prefill_lens=[4000] * 8)
    )


def test_only_a_spec_without_figures_is_unmeasured():
    plain = {"claimed": None, "measured": None}
    fields = {text.split(",")[0] for text in violations_of(DOCUMENT, **plain)}
    assert fields == {"perf_md: eager_us", "perf_md: graph_us", "unfused_kernels"}
    blank = perf(eager_us=None, graph_us=None) | {"unfused_kernels": None}
    dataclasses.replace(DOCUMENT, **plain, **blank).validate()
    assert len(violations_of(DOCUMENT, **blank)) == 3


def test_the_floor_is_that_of_the_document():
    assert DOCUMENT.weight_bytes() == 2 * 1_235_814_400
    assert DOCUMENT.kv_bytes() == 16416 * 16 * 2 * 8 * 64 * 2
    assert round(DOCUMENT.floor_us()) == 627
    untied = dataclasses.replace(DOCUMENT, cfg=DOCUMENT.cfg | {"tied": False})
    assert untied.weight_bytes() == DOCUMENT.weight_bytes()


def test_a_model_with_a_head_of_its_own_says_so():
    found = violations_of(DOCUMENT, cfg=DOCUMENT.cfg | {"tied": False})
    assert found == ['contract_md: expected a row of `weights["lm_head"]`, got none']


@pytest.mark.parametrize("spec", load_all().values(), ids=lambda spec: spec.name)
def test_the_tiny_scale_keeps_what_is_hard(spec):
    full, tiny = spec.full(), spec.tiny()
    assert tiny.cfg["n_q"] * full.cfg["n_kv"] == full.cfg["n_q"] * tiny.cfg["n_kv"]
    assert tiny.cfg.keys() == full.cfg.keys()
    assert tiny.batch == len(tiny.prefill_lens) == spec.batch
    assert max(tiny.prefill_lens) + tiny.decode_steps < tiny.max_seq
    if spec.kind == "paged":
        size = tiny.cfg["page_size"]
        assert max(tiny.prefill_lens) // size < (max(tiny.prefill_lens) + tiny.decode_steps) // size
    assert (len(set(tiny.prefill_lens)) > 1) == spec.per_sequence_pos


def test_the_hash_is_of_every_field():
    hashes = {DOCUMENT.hash()}
    for field in dataclasses.fields(DOCUMENT):
        other = {str: "x", list: ["x"], dict: {"x": 1}}.get(
            type(getattr(DOCUMENT, field.name)), 12345
        )
        changed = perf(text="x") if field.name == "perf_md" else {field.name: other}
        hashes.add(dataclasses.replace(DOCUMENT, **changed).hash())
    assert len(hashes) == 1 + len(dataclasses.fields(DOCUMENT))


def test_measurements_are_read_by_gpu_and_name(tmp_path, monkeypatch):
    monkeypatch.setattr(spec_module, "MEASURED", tmp_path)
    assert Figures.load(DOCUMENT.name) is None
    path = tmp_path / "h200" / f"{DOCUMENT.name}.json"
    path.parent.mkdir()
    found = {"spec": DOCUMENT.name, "scale": "full", "steps": 8, **dataclasses.asdict(FIGURES)}
    path.write_text(json.dumps(found))
    assert Figures.load(DOCUMENT.name) == FIGURES
    path.write_text(json.dumps(found | {"scale": "tiny"}))
    with pytest.raises(ValueError, match="at full scale, got megakernel-gqa-paged-decode at tiny"):
        Figures.load(DOCUMENT.name)


def test_an_unknown_task_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"expected one of megakernel-gqa-decode.*, got other"):
        load("other")


def test_numbers_stand_alone():
    text = "258 pages, `d`=2048, 2.2x, 0..128, 7.6e-1**, 16384. n_q8 128-token (1, 64) -- 6e-2"
    assert numbers(text) == {258, 2048, 0, 0.76, 16384, 128, 1, 64, 0.06}
