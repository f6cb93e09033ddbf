# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from kernelkit import report
from kernelkit.results import Environment, merge, results_path

ENV = Environment("NVIDIA H200", "2.11.0", "13.0", "580.1", "2026-11-30")
DOCS = Path(__file__).parents[3] / "docs" / "benchmarks"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        ENV.row("gemv", "bf16_gemv", f"M=1,N={n},K=8", provider, time)
        for n, times in {64: (8.0, 4.0), 128: (8.0, 1.0)}.items()
        for provider, time in zip(("cublas", "astrai"), times, strict=True)
    ]
    merge(results_path(tmp_path, ENV.gpu, "gemv"), rows)
    return tmp_path


def test_the_page_holds_times_and_geometric_means(folder: Path) -> None:
    assert report.main([str(folder)]) == 0
    page = (folder / "README.md").read_text("utf-8")
    assert "Geometric mean against `cublas`: `astrai` 4.00x" in page
    assert "| M=1,N=64,K=8 | 8.0 | 4.0 |  |" in page


def test_what_was_not_measured_has_no_section_and_no_mean(tmp_path: Path) -> None:
    rows = [ENV.row("attention", "attn_paged_decode", "B=1", "astrai", 8.0)]
    merge(results_path(tmp_path, ENV.gpu, "attention"), rows)
    page = report.render(tmp_path)
    head = "| case | flashinfer | astrai | astrai-serial | astrai-static | astrai-capacity131072 |"
    assert f"### attn_paged_decode\n\n{head}" in page
    assert "Geometric mean" not in page and "### rotary_emb" not in page


@pytest.mark.parametrize(("op", "provider"), [("attn", "astrai"), ("rotary_emb", "rival")])
def test_a_row_without_a_place_is_an_error(tmp_path: Path, op: str, provider: str) -> None:
    rows = [ENV.row("attention", op, "B=1", provider, 8.0)]
    merge(results_path(tmp_path, ENV.gpu, "attention"), rows)
    with pytest.raises(ValueError, match=f"no place in the page for .*{op}"):
        report.render(tmp_path)


def test_check_finds_a_page_that_was_edited(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main([str(folder)])
    assert report.main([str(folder), "--check"]) == 0
    page = folder / "README.md"
    page.write_text(page.read_text("utf-8").replace("4.00x", "5.00x"), "utf-8")
    assert report.main([str(folder), "--check"]) == 1
    assert "is not what its JSON says" in capsys.readouterr().out


def test_the_committed_page_is_what_its_json_says() -> None:
    assert report.main([str(DOCS), "--check"]) == 0
