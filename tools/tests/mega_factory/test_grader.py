# SPDX-License-Identifier: Apache-2.0
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mega_factory.grader import __main__ as command_line
from mega_factory.grader import grading
from mega_factory.grader.grading import BundleError, grade
from mega_factory.grader.process import PROC

SOLUTIONS = Path(__file__).with_name("solutions")


@pytest.mark.parametrize("name", ["right_fp32", "right_bf16", "thread_runs_on"])
def test_right(graded, name):
    report = graded(name)
    assert report.passed, report.text()
    assert len(report.errors) == 3 and max(report.errors) < report.tol / 2
    assert report.timing.steps == 3 * 4


def test_what_runs_on_without_teardown_gets_a_process_for_each_run(graded, monkeypatch):
    monkeypatch.setattr(grading, "IDLE_S", 0.5)
    report = graded("never_idle", runs=2)
    assert report.passed, report.text()
    assert len(report.errors) == 2


def test_the_reference_is_right_with_lengths_of_their_own(contiguous):
    report = grade(contiguous, contiguous / "reference.py", scale="tiny", device="cpu", runs=2)
    assert report.passed, report.text()
    assert report.errors == [0, 0]


# What is found in each run. A wrong layer makes the keys of the next one wrong.
WRONG = {
    "ignores_table": [{"logits", "foreign_page", "own_page", "kv_append"}],
    "reads_foreign_pages": [{"logits", "kv_append"}, {"reads_foreign_pages", "kv_append"}],
    "reads_unwritten_slots": [set(), set(), {"reads_unwritten_slots", "kv_append"}],
    "never_appends": [{"logits", "kv_append"}],
    "keeps_its_own_pool": [{"kv_append"}],
    "caches_logits": [set(), {"stale_logits", "kv_append"}],
    "returns_another_step": [{"stale_logits"}],
    "writes_foreign_page": [{"foreign_page"}],
    "writes_ahead": [{"own_page"}],
    "changes_arguments": [{"weights", "page_table", "cfg", "arguments"}],
    "computes_in_a_subprocess": [{"child_process"}],
    "crashes": [{"crash"}],
    "exits": [{"crash"}],
    "raises": [{"exception"}],
    "patches_clock": [{"clock"}],
    "forges_answers": [{"protocol"}],
    "no_decode_step": [{"import"}],
}


DETAILS = {
    "keeps_its_own_pool": "kv_cache.k.0: sequence 0, position 21 is not in page",
    "caches_logits": "5 of 5 steps are wrong; these are what it returned in run 1, step 0",
    "returns_another_step": "these are what it returned in run 1, step 1",
    "changes_arguments": "weights.layers.1.gate: 2 bytes changed, it is read-only",
    "computes_in_a_subprocess": "alive after build_model: .* time.sleep",
    "crashes": "step 1: the process was killed by SIGSEGV, in decode_step\nPASS",
    "exits": "the process exited with status 0, in build_model",
    "raises": "in teardown: SystemExit: no end for Decoder\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(graded, name):
    report = graded(name, runs=len(WRONG[name]), seed=2)
    found = [set() for _ in WRONG[name]]
    for finding in report.findings:
        found[finding.run - 1].add(finding.check)
    assert found == WRONG[name], report.text()
    assert not report.passed
    assert any(re.search(DETAILS.get(name, ""), str(f)) for f in report.findings), report.text()


@pytest.mark.parametrize(
    "check",
    ["output_type", "output_shape", "output_dtype", "output_device", "output_alias", "non_finite"],
)
def test_wrong_logits(graded, monkeypatch, check):
    monkeypatch.setenv("RETURNS", check)
    report = graded("returns_wrongly", runs=1)
    assert [(f.check, f.run, f.step) for f in report.findings] == [(check, 1, 0)], report.text()


def test_nothing_outlives_a_solution_that_hangs(graded):
    (finding,) = graded("hangs", time_limit=5).findings
    assert (finding.check, finding.step) == ("time_limit", 2)
    assert finding.detail == "more than 5 s in all, now in decode_step"
    assert not [p for p in PROC.glob("[0-9]*/cmdline") if b"sleep\x00601" in p.read_bytes()]


def test_a_seed_repeats_inputs_and_errors(graded):
    first = graded("right_fp32", runs=1)
    assert graded("right_fp32", runs=1, seed=first.seed).errors == first.errors


def test_command_line_of_a_bundle(paged, tmp_path):
    written = tmp_path / "report.json"
    options = ["--scale", "tiny", "--device", "cpu", "--seeds", "1", "--seed", "5"]
    command = [sys.executable, paged / "grade.py", SOLUTIONS / "right_fp32.py", *options]
    done = subprocess.run(
        [*command, "--json", written], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny-paged (0123456789ab), tiny, cpu, --seed 5" and lines[-1] == "PASS"
    report = json.loads(written.read_text())
    assert report["verdict"] == "pass" and report["seed"] == 5 and report["findings"] == []
    assert 0 < report["timing"]["p10_us"] <= report["timing"]["median_us"]


def main(monkeypatch, bundle, *arguments):
    argv = ["grade.py", *arguments, "--scale", "tiny", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    return command_line.main(bundle)


def test_exit_status_of_a_wrong_solution(paged, monkeypatch, capsys):
    assert main(monkeypatch, paged, SOLUTIONS / "exits.py") == 1
    assert "FAIL crash: run 1: the process exited with status 0" in capsys.readouterr().out


def test_exit_status_of_what_cannot_be_graded(paged, tmp_path, monkeypatch, capsys):
    assert main(monkeypatch, paged, "absent.py") == 2
    expected = "grade.py: solution: expected a Python file, got absent.py\n"
    assert capsys.readouterr() == ("", expected)
    assert main(monkeypatch, tmp_path, SOLUTIONS / "right_fp32.py") == 2
    expected = "grade.py: bundle: expected a folder with a spec.json"
    assert capsys.readouterr().err.startswith(expected)
    # Whatever else goes wrong in this process is not the solution's failure either.
    broken = tmp_path / "broken"
    shutil.copytree(paged, broken)
    (broken / "reference.py").write_text("raise OSError('gone')")
    assert main(monkeypatch, broken, SOLUTIONS / "right_fp32.py") == 2
    assert "OSError: gone" in capsys.readouterr().err
    with pytest.raises(BundleError, match="scale: expected one of tiny, got full"):
        grade(paged, SOLUTIONS / "right_fp32.py", device="cpu")
