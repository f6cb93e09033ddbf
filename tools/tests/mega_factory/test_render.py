# SPDX-License-Identifier: Apache-2.0
"""Bundles; `python tools/tests/mega_factory/test_render.py` writes their golden files anew."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest

from mega_factory.grader.checks import APPEND_TOL
from mega_factory.grader.grading import RUNS, TIME_LIMIT_S
from mega_factory.render import drift, figures_md, how_md, orphans, render, spec_json, write
from mega_factory.specs import load, load_all

GOLDEN = Path(__file__).parent / "golden"
FILES = ("TASK.md", "solution.py", "spec.json")
SPECS = load_all()
BY_NAME = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
DOCUMENT = load("megakernel-gqa-paged-decode")


@BY_NAME
def test_golden_files(spec):
    files = render(spec)
    for name in FILES:
        assert files[name] == (GOLDEN / spec.name / name).read_text("utf-8")


def test_no_golden_file_of_a_task_that_is_gone():
    assert {path.name for path in GOLDEN.iterdir()} == set(SPECS)


@BY_NAME
def test_a_bundle_has_its_sources_verbatim(spec, tmp_path):
    files = render(spec)
    assert files == render(spec)
    package = Path(render.__code__.co_filename).parent
    assert files["reference.py"] == (package / "models" / f"{spec.kind}.py").read_text("utf-8")
    assert files["grade.py"] == (package / "grader" / "grade.py").read_text("utf-8")
    for path in (package / "grader").glob("*.py"):
        if path.name != "grade.py":
            assert files[f"grader/{path.name}"] == path.read_text("utf-8")
    bundle = write(spec, tmp_path)
    assert {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()} == set(
        files
    )
    functions = [node.name for node in ast.parse(files["solution.py"]).body[1:]]
    assert functions == ["build_model", "decode_step", "teardown"]


def test_a_changed_spec_changes_the_hash_in_the_bundle():
    other = dataclasses.replace(DOCUMENT, tol=0.061)
    assert spec_json(other)["hash"] != spec_json(DOCUMENT)["hash"]
    assert json.loads(render(other)["spec.json"])["scales"]["tiny"]["tol"] == 0.061


def test_drift(tmp_path):
    name = DOCUMENT.name
    assert list(drift(DOCUMENT, tmp_path)) == [f"{name}: missing"]
    bundle = write(DOCUMENT, tmp_path)
    assert list(drift(DOCUMENT, tmp_path)) == []
    (bundle / "reference.py").write_text("")
    (bundle / "TASK.md").unlink()
    edited = f"{name}: reference.py: edited, or rendered by another version of the factory"
    assert list(drift(DOCUMENT, tmp_path)) == [f"{name}: TASK.md: missing", edited]
    (bundle / "TASK.md").write_bytes(b"\xff\xfe")
    (bundle / "torch.py").write_text("raise SystemExit(0)")
    (bundle / "grader" / "__pycache__").mkdir()
    (bundle / "grader" / "__pycache__" / "checks.pyc").write_bytes(b"")
    binary = edited.replace("reference.py", "TASK.md")
    assert list(drift(DOCUMENT, tmp_path)) == [
        binary,
        edited,
        f"{name}: torch.py: not of the bundle",
    ]
    changed = dataclasses.replace(DOCUMENT, title="Other")
    stale = f"{name}: stale: rendered from {DOCUMENT.hash()}, the spec is now {changed.hash()}"
    assert list(drift(changed, tmp_path)) == [stale]
    (bundle / "spec.json").write_text("{}")
    assert len(list(drift(DOCUMENT, tmp_path))) == 4
    (tmp_path / "notes").mkdir()
    assert list(orphans([name], tmp_path)) == []
    assert list(orphans(["other"], tmp_path)) == [f"{name}: of no task"]


@BY_NAME
def test_a_task_says_how_it_is_run(spec):
    text = how_md(spec)
    assert f"There are {RUNS} runs by default" in text and f"{TIME_LIMIT_S:g} s" in text
    assert f"relative error of\n  {APPEND_TOL * spec.tol:g}," in text
    assert ("page table" in text) == (spec.kind == "paged")


def test_figures_name_where_they_were_measured():
    figures = dataclasses.replace(DOCUMENT.claimed, measured_on="NVIDIA H200", kernels=801)
    unmeasured = dataclasses.replace(DOCUMENT, measured=None)
    assert "Not yet measured with the fixtures of this bundle." in figures_md(unmeasured)
    both = figures_md(dataclasses.replace(DOCUMENT, measured=figures))
    assert both.startswith("| what | H200, with its author's fixtures | NVIDIA H200 |\n")
    assert "| kernels per step of the reference | 772 | 801 |" in both
    assert "| CUDA graph of the reference | capture fails | capture fails |" in both
    ours = dataclasses.replace(DOCUMENT, claimed=None, measured=figures)
    assert figures_md(ours).startswith("| what | NVIDIA H200 |\n")
    times = dataclasses.replace(DOCUMENT.perf_md, eager_us=None, graph_us=None)
    none = dataclasses.replace(ours, measured=None, unfused_kernels=None, perf_md=times)
    assert figures_md(none) == "None: the tolerance is not yet backed by any measurement."
    assert spec_json(none)["baselines"] is None
    assert spec_json(ours)["baselines"] == {"eager_us": 10764, "busy_us": 6296, "graph_us": None}


if __name__ == "__main__":
    for task in SPECS.values():
        for file in FILES:
            path = GOLDEN / task.name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(task)[file], "utf-8")
