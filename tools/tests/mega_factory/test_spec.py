# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json

import pytest

from mega_factory import spec as spec_module
from mega_factory.models import contiguous
from mega_factory.spec import Figures, SpecError
from mega_factory.specs import load, load_all
from mega_factory.specs._common import tolerance_md

DOCUMENT = load("megakernel-gqa-paged-decode")
BATCH = load("megakernel-gqa-paged-decode-batch8")
FIGURES = dataclasses.replace(DOCUMENT.claimed, measured_on="NVIDIA H200")


def violations_of(spec, **changes):
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(spec, **changes).validate()
    return caught.value.violations


def swapped(field, old, new, spec=DOCUMENT):
    text = getattr(spec, field)
    assert old in text
    return {field: text.replace(old, new)}


def advice(old, new):
    assert old in DOCUMENT.perf_md.extra
    return perf(extra=DOCUMENT.perf_md.extra.replace(old, new))


def perf(**changes):
    return {"perf_md": dataclasses.replace(DOCUMENT.perf_md, **changes)}


def claimed(**changes):
    return {"claimed": dataclasses.replace(DOCUMENT.claimed, **changes)}


def measured(**changes):
    return {"measured": dataclasses.replace(FIGURES, **changes)}


def test_every_spec_is_valid():
    assert len(load_all()) >= 4
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
        ({"decode_steps": 1}, "decode_steps: expected at least 8, got 1"),
        ({"decode_steps": 129}, "max_seq: expected at least prefill_len + decode_steps = 16513"),
        ({"max_seq": 16500}, "max_seq: expected a multiple of page_size = 128, got 16500"),
        ({"prefill_lens": [1, 16384]}, "prefill_lens: their number: expected 1, got 2"),
        ({"prefill_lens": [9]}, "prefill_len: the most of prefill_lens: expected 9, got 16384"),
        ({"title": " "}, "title: expected a text"),
        ({"max_seq": 16640}, "spec_md: expected it to state 'holds 260 pages'"),
        ({"max_seq": 16640}, 'contract_md: expected = 260  in the row of `kv_cache["k"]`'),
        ({"model_src": contiguous.MODEL_SRC}, "model_src: expected the reference of a paged cache"),
        ({"model_src": ""}, "model_src: expected a function build_model, got none"),
        (swapped("contract_md", "16 dicts", "15 dicts"), "expected 16 dicts in the row"),
        (swapped("contract_md", "`gate (ffn, d)`, ", ""), "`gate (ffn, d)` in the row of"),
        (swapped("contract_md", "| `token_ids`", "| `ids`"), "expected a row of `token_ids`"),
        (swapped("contract_md", "(1, 128256)", "(1, 128)"), "`(1, 128256)` after **Return**"),
        (
            swapped("regime_md", "ffn=8192", "ffn=8191"),
            "regime_md: expected it to state 'ffn=8192'",
        ),
        (swapped("regime_md", "627", "628"), "expected it to state 'floor near 627 us'"),
        (perf(floor_us=600), "perf_md: expected floor_us = 627: 2.472 GB of weights and 537.9 MB"),
        (perf(lead="slow"), "perf_md: expected it to state '2.47 GB of weights and 538 MB of KV'"),
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
            "expected a table of the errors and tol, [0.0277, 0.0277, 0.06, 0.107, 0.76], got",
        ),
        (
            swapped("precision_md", "`6e-2`", "`5e-2`"),
            "expected it to state tol, 0.06, got 5e-2, 6e-2",
        ),
        (
            swapped("correctness_md", "0.06", "0.05"),
            "correctness_md: expected it to state 'at most **0.06**'",
        ),
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


# Texts that would tell a solver something false.
LIES = [
    swapped("regime_md", "decode 32 more", "decode 99 more"),
    swapped("regime_md", "batch 1,", "batch 7,"),
    swapped("regime_md", "2.47 GB of weights + 538 MB", "9.99 GB of weights + 1 MB"),
    swapped("regime_md", "258-page pool", "300-page pool"),
    swapped("regime_md", "sequence owns 129", "sequence owns 7"),
    swapped("blurb", "538 MB", "999 MB"),
    swapped("blurb", "128-token", "64-token"),
    swapped("contract_md", "page_size, hd)` | `bfloat16`", "page_size, hd)` | `float32`"),
    swapped("contract_md", "`(128256, 2048)` | `bfloat16`", "`(128256, 2048)` | `float16`"),
    swapped("contract_md", 'as `["k"]` | `bfloat16`', 'as `["k"]` | `float32`'),
    swapped("contract_md", "bf16 or fp32, both accepted", "fp8 only"),
    swapped("contract_md", "**0.76**", "**0.01**"),
    swapped("contract_md", "`pos < max_seq_len`", "`pos <= max_seq_len`"),
    swapped("blurb", "538 MB", "33 MB"),
    swapped("contract_md", "by 13x", "by 30x"),
    swapped("spec_md", "holding 16384 tokens", "holding 999 tokens"),
    swapped("spec_md", "pos = 16384", "pos = 5"),
    swapped("spec_md", "spread over 128 pages", "spread over 12 pages"),
    swapped("precision_md", "prefill 16384", "prefill 77"),
    swapped("precision_md", "8\nconsecutive", "99\nconsecutive"),
    swapped("precision_md", "2 weight/token seeds", "5 weight/token seeds"),
    swapped("precision_md", "2.2x E", "9x E"),
    swapped("precision_md", "E = 2.8e-2", "E = 1e-2"),
    swapped("correctness_md", "**0.76**", "**0.01**"),
    swapped(
        "contract_md", "`max_seq_len` | scalar | python `int`", "`max_seq_len` | `(B,)` | `float32`"
    ),
    swapped("contract_md", "`cfg` | `dict`", "`cfg` | `list`"),
    swapped("contract_md", "`kv_cache` | `dict`", "`kv_cache` | list, not a `dict`"),
    swapped("contract_md", '`kv_cache["page_size"]` | scalar', '`kv_cache["page_size"]` | `(B,)`'),
    swapped("contract_md", "`int32`, on the GPU", "`int32`, on the CPU"),
    swapped("contract_md", "`int64`, on the GPU", "`int64`, on the CPU"),
    swapped("contract_md", "| `pos` | scalar | python `int` |", "| `pos` | scalar |"),
    {"arg_doc": "cfg : tuple"},
    swapped("arg_doc", "kv_cache  : dict", "kv_cache  : list"),
    swapped("arg_doc", "weights   :", "tensors   :"),
    advice("6.3 ms row", "1.3 ms row"),
    advice("538 MB per step", "100 MB per step"),
]


@pytest.mark.parametrize("changes", LIES)
def test_a_false_text_is_a_violation(changes):
    assert len(violations_of(DOCUMENT, **changes)) >= 1


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("regime_md", "batch 8,", "batch 3,"),
        ("regime_md", "decode 32 more", "decode 5 more"),
        ("blurb", "4000 tokens", "40 tokens"),
        ("spec_md", "32 per sequence", "3 per sequence"),
        ("precision_md", "2 seeds", "9 seeds"),
    ],
)
def test_a_false_text_of_ours_is_a_violation(field, old, new):
    assert len(violations_of(BATCH, **swapped(field, old, new, BATCH))) >= 1


def test_the_performance_table_is_that_of_the_figures():
    text = dataclasses.replace(DOCUMENT.perf_md, graph_us=None).text
    assert "| eager torch, the reference | 10764 | 17.2 |\n" in text
    assert "| eager torch, GPU busy only | not yet measured | not yet measured |\n" in text


def test_without_a_gpu_the_tolerance_is_bound_by_errors_on_a_cpu():
    times = dataclasses.replace(BATCH.perf_md, eager_us=None, graph_us=None)
    unmeasured = {"claimed": None, "measured": None, "unfused_kernels": None, "perf_md": times}
    found = violations_of(BATCH, **unmeasured, tol=0.9)
    assert any(text.startswith("tol: on a CPU: expected") for text in found)
    unmeasured = dataclasses.replace(BATCH, **unmeasured)
    assert unmeasured.note.startswith("the tolerance is not yet measured on a GPU: correct")
    assert DOCUMENT.note is None


def test_without_a_measurement_only_texts_that_state_one_are_violations():
    blank = perf(eager_us=None, graph_us=None) | {"unfused_kernels": None}
    blank |= {"claimed": None, "measured": None, "cpu": None}
    (found,) = violations_of(DOCUMENT, **blank)
    assert found.startswith("precision_md: expected a table of the errors and tol, [0.06], got")
    text = tolerance_md(DOCUMENT.tol, None, None, DOCUMENT.drops)
    spec = dataclasses.replace(DOCUMENT, precision_md=text, **blank).validate()
    assert spec.note == "the tolerance is not yet backed by any measurement"
    assert "**not yet backed by any measurement**" in text


def test_all_violations_are_listed_at_once():
    changes = {"unfused_kernels": 1, **perf(floor_us=1), **swapped("regime_md", "8192", "1")}
    with pytest.raises(ValueError, match=DOCUMENT.name) as caught:
        dataclasses.replace(DOCUMENT, tol=0.5, **changes).validate()
    for field in ("unfused_kernels", "perf_md", "regime_md", "tol", "correctness_md"):
        assert f"\n  {field}: " in str(caught.value)


def test_a_wrong_size_hides_no_other_violation():
    texts = {"regime_md": "x", "contract_md": "none"}
    found = violations_of(DOCUMENT, decode_steps=4, tol=1e-3, **texts)
    for field in ("decode_steps", "tol", "regime_md", "contract_md"):
        assert any(text.startswith(f"{field}: ") for text in found), field
    sizes = DOCUMENT.cfg | {"layers": 0, "d": 0, "n_q": 33}
    del sizes["eps"]
    found = violations_of(DOCUMENT, cfg=sizes, batch=0, max_seq=0, title="", tol=1e-3, arg_doc="x")
    for text in (
        "cfg: expected also eps", "cfg['layers']: expected a positive int, got 0",
        "cfg['d']: expected a positive int, got 0",
        "cfg['n_q']: expected a multiple of n_kv = 8, got 33",
        "batch: expected a positive int, got 0", "max_seq: expected a positive int, got 0",
        "title: expected a text, got an empty one",
        "tol: claimed: expected 0.0554 to 0.111", "arg_doc: expected arguments of the types",
    ):  # fmt: skip
        assert any(line.startswith(text) for line in found), text


def test_what_was_not_measured_hides_no_other_violation():
    found = violations_of(DOCUMENT, tol=0.08, **claimed(errors={}, drops={"never_append": 0.107}))
    for text in (
        "tol: claimed: expected errors of all_fp32, fp32_residual, got none",
        "tol: claimed: expected drops of ignore_table, got none",
        "tol: claimed: expected at most 0.0713, so that never_append",
    ):
        assert any(line.startswith(text) for line in found), text


def test_lengths_per_sequence_need_positions_per_sequence():
    row = next(r for r in DOCUMENT.contract_md.splitlines() if r.startswith("| `pos`"))
    lines = BATCH.contract_md.splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith("| `pos`"))
    lines[index] = row
    found = violations_of(BATCH, contract_md="\n".join(lines))
    assert found == [
        "contract_md: expected the shape `(B,)` of `pos`, got scalar",
        "contract_md: expected the dtype `int64`, on the GPU of `pos`, got python `int`",
    ]
    assert any(
        "different lengths" in text for text in violations_of(BATCH, prefill_lens=[4000] * 8)
    )


def test_only_a_spec_without_figures_is_unmeasured():
    plain = {"claimed": None, "measured": None}
    plain["cpu"] = FIGURES
    # Without one of the times nothing is claimed.
    fields = {
        text.split(",")[0] for text in violations_of(DOCUMENT, **plain, **perf(graph_us=None))
    }
    assert fields == {"perf_md: eager_us", "unfused_kernels"}
    blank = perf(eager_us=None, graph_us=None) | {"unfused_kernels": None}
    dataclasses.replace(DOCUMENT, **plain, **blank).validate()
    assert len(violations_of(DOCUMENT, **blank)) == 3


def test_claims_that_measurements_contradict_are_corrected():
    at_2k = load("megakernel-gqa-decode").measured
    assert "2.02e-2 at 16k of context and by up to 2.09e-2 at 2k" in DOCUMENT.precision_md
    assert at_2k.floor >= DOCUMENT.measured.floor
    assert "the error is 5.35e-1, not 7.6e-1: 8.9 times `tol`, not 13" in DOCUMENT.precision_md
    assert "was not\nmeasured with its fixtures" in DOCUMENT.correctness_md


def test_the_floor_is_that_of_the_document():
    assert DOCUMENT.weight_bytes == 2 * 1_235_814_400
    assert DOCUMENT.kv_bytes == 16416 * 16 * 2 * 8 * 64 * 2
    assert round(DOCUMENT.floor_us) == 627
    untied = dataclasses.replace(DOCUMENT, cfg=DOCUMENT.cfg | {"tied": False})
    assert untied.weight_bytes == DOCUMENT.weight_bytes


def test_a_model_with_a_head_of_its_own_says_so():
    keys, head = violations_of(DOCUMENT, cfg=DOCUMENT.cfg | {"tied": False})
    assert keys.endswith("wdtype, page_size, tied` in the row of `cfg`")
    assert head == 'contract_md: expected a row of `weights["lm_head"]`, got none'


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
        changed = perf(lead="x") if field.name == "perf_md" else {field.name: other}
        hashes.add(dataclasses.replace(DOCUMENT, **changed).hash())
    assert len(hashes) == 1 + len(dataclasses.fields(DOCUMENT))


def test_measurements_are_read_by_gpu_and_name(tmp_path, monkeypatch):
    monkeypatch.setattr(spec_module, "MEASURED", tmp_path)
    assert Figures.load(DOCUMENT.name) is None
    path = tmp_path / "h200" / f"{DOCUMENT.name}.json"
    path.parent.mkdir()
    found = {"spec": DOCUMENT.name, "scale": "full", **dataclasses.asdict(FIGURES)}
    path.write_text(json.dumps(found))
    assert Figures.load(DOCUMENT.name) == FIGURES
    path.write_text(json.dumps(found | {"scale": "tiny"}))
    with pytest.raises(ValueError, match="at full scale, got megakernel-gqa-paged-decode at tiny"):
        Figures.load(DOCUMENT.name)


def test_an_unknown_task_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"expected one of megakernel-gqa-decode.*, got other"):
        load("other")
