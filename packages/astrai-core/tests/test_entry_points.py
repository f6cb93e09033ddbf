# SPDX-License-Identifier: Apache-2.0
"""Distributions whose entry points are lost or wrong, which pip would count as installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest
from test_discovery import REINSTALL, expect

from astrai_core import discovery
from astrai_core.discovery import family
from astrai_core.reasons import ReasonKind
from conftest import Site


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (None, "is missing"),
        (b"", "does not name gemv in [astrai.families]"),
        (b"[astrai.families]\n", "does not name gemv in [astrai.families]"),
        (b"[\xff\xfe]\n", "cannot be read (UnicodeDecodeError: "),
    ],
)
def test_a_distribution_whose_entry_point_is_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch, entries: bytes | None, problem: str
) -> None:
    site.add()
    info = site.folder / "astrai_gemv-0.1.0.dist-info"
    (info / "entry_points.txt").unlink()
    if entries is not None:
        (info / "entry_points.txt").write_bytes(entries)
    there = {"astrai-gemv": importlib.metadata.Distribution.at(info)}
    monkeypatch.setattr(discovery, "_installed", there.get)
    discovery.forget()
    text = f"entry_points.txt of astrai-gemv 0.1.0 {problem}"
    for found in (family("gemv"), discovery.find("gemv")):
        expect(found.reason, ReasonKind.BAD_MANIFEST, text, REINSTALL)
        assert found.version == "0.1.0"


def test_an_installed_distribution_is_found(site: Site, run_python: Callable[..., str]) -> None:
    site.add("quite-new")
    (site.folder / "astrai_quite_new-0.1.0.dist-info" / "entry_points.txt").unlink()
    script = f"""
import sys
sys.path.insert(0, {str(site.folder)!r})
from astrai_core.discovery import find
print(find("quite-new").version, find("still-newer").version)
"""
    assert run_python(script).split() == ["0.1.0", "None"]


@pytest.mark.parametrize("value", ["standin_ no module!!", "standin_gemv:", "standin_gemv..x"])
def test_an_entry_point_that_names_no_module(site: Site, value: str) -> None:
    site.add()
    entries = site.folder / "astrai_gemv-0.1.0.dist-info" / "entry_points.txt"
    entries.write_text(f"[astrai.families]\ngemv = {value}\n", "utf-8")
    discovery.forget()
    text = f"entry_points.txt: expected the name of a module for gemv, got {value!r}"
    expect(family("gemv").reason, ReasonKind.BAD_MANIFEST, text, REINSTALL)
