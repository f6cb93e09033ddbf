# SPDX-License-Identifier: Apache-2.0
"""Stand-in families as real distributions on disk, and GPUs that are not there."""

from __future__ import annotations

import importlib
import importlib.machinery
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from astrai_core import device, discovery, policy, tables
from astrai_core.tables import Row

EXTENSION = "_native" + importlib.machinery.EXTENSION_SUFFIXES[0]

# The kernels add 100, so that their results can be told from torch's.
NATIVE = """
import torch.nn.functional as F
calls = []
def bf16_gemv(x, weight, bias=None):
    calls.append(tuple(x.shape))
    return F.linear(x, weight, bias) + 100
def bf16_swiglu(x, up, gate):
    calls.append(tuple(x.shape))
    return F.linear(x, up) * F.silu(F.linear(x, gate)) + 100
"""
PACKAGE = """
import importlib
def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(importlib.import_module(__name__ + "._native"), name)
"""


class Site:
    """A folder of stand-in distributions; those that are really installed are hidden."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        name: str = "gemv",
        *,
        distribution: str | None = None,
        package: str | None = None,
        version: str = "0.1.0",
        native: dict[str, str] | None = None,
        manifest_text: str = "",
        **manifest: object,
    ) -> str:
        """Installs a family and returns its import name.

        `native` are the files of its native module; `manifest` replaces attributes of the
        manifest, to which `manifest_text` is appended.
        """
        distribution = distribution or f"astrai-{name}"
        package = package or f"standin_{name}"
        attributes: dict[str, object] = {
            "NAME": name,
            "CONTRACT": discovery.CONTRACT,
            "PACKAGE": package,
            "NATIVE": f"{package}._native",
            "CUDA": "13.0",
            "SASS": ("80", "89", "90a"),
            "PTX": ("80",),
            "OPS": {"bf16_gemv": ("bfloat16",), "bf16_swiglu": ("bfloat16",)},
            **manifest,
        }
        files = {
            f"{package}/__init__.py": PACKAGE,
            f"{package}/_family.py": "\n".join(
                [*(f"{key} = {value!r}" for key, value in attributes.items()), manifest_text]
            ),
        }
        for file, text in ({"_native.py": NATIVE} if native is None else native).items():
            files[f"{package}/{file}"] = text
        info = f"{distribution.replace('-', '_')}-{version}.dist-info"
        files[f"{info}/METADATA"] = (
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        files[f"{info}/entry_points.txt"] = f"[{discovery.GROUP}]\n{name} = {package}._family\n"
        for file, text in files.items():
            path = self.folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        importlib.invalidate_caches()
        forget()
        return package

    def native_of(self, package: str) -> ModuleType:
        """The imported native module of a family."""
        return importlib.import_module(f"{package}._native")


def forget() -> None:
    """Makes the package look at families and devices again."""
    for name in [name for name in sys.modules if name.startswith("standin_")]:
        del sys.modules[name]
    policy.forget()
    for question in (device.capability, device.driver_version):
        if hasattr(question, "cache_clear"):
            question.cache_clear()


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No selection from outside; installed families are hidden, but for tests on a GPU."""
    for variable in ("ASTRAI_GEMV", "ASTRAI_SWIGLU", "ASTRAI_DECODE", "ASTR_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
    if request.node.get_closest_marker("gpu") is None:
        real = discovery._entries

        def standins_only() -> Any:
            return [entry for entry in real() if entry.point.value.startswith("standin_")]

        monkeypatch.setattr(discovery, "_entries", standins_only)
        monkeypatch.setattr(discovery, "_installed", lambda _: None)
    forget()
    yield
    forget()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A folder of stand-in families on sys.path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return Site(folder)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the package see GPUs of the given capabilities, under a driver."""

    def present(*capabilities: tuple[int, int], driver: tuple[int, int] | None = (13, 0)) -> None:
        known = dict(enumerate(capabilities))
        monkeypatch.setattr(device, "count", lambda: len(known))
        monkeypatch.setattr(device, "capability", known.get)
        monkeypatch.setattr(device, "driver_version", lambda: driver)

    return present


@pytest.fixture
def seen_as_gpu(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, on which every tensor seems to be."""
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs a script in a process of its own and returns what it prints."""

    def run(script: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def install_attention(site: Site, **manifest: Any) -> Any:
    """Installs a stand-in attention family and returns its native module."""
    source = Path(__file__).with_name("attention_standin.py").read_text("utf-8")
    ops = (
        "attn_decode",
        "attn_prefill",
        "attn_paged_decode",
        "attn_paged_prefill",
        "rotary_emb",
    )
    options = {"OPS": dict.fromkeys(ops, ("bfloat16",)), "Q_TILE_ROWS": 64, **manifest}
    package = site.add("attention", native={"_native.py": source}, **options)
    return site.native_of(package)


def install_decode(site: Site) -> dict[str, ModuleType]:
    """Installs the stand-in families of composed decode and returns their native modules."""
    source = Path(__file__).with_name("decode_standin.py").read_text("utf-8")
    families = {
        "gemv": ("bf16_gemv", "bf16_swiglu", "add_rms_norm"),
        "attention": ("rotary_emb", "attn_paged_decode"),
    }
    packages = {
        family: site.add(
            family, native={"_native.py": source}, OPS=dict.fromkeys(ops, ("bfloat16",))
        )
        for family, ops in families.items()
    }
    return {family: site.native_of(package) for family, package in packages.items()}


@pytest.fixture
def kernels(site: Site, seen_as_gpu: None) -> dict[str, ModuleType]:
    """Stand-in families with all ops of a step, on a GPU where all tensors seem to be."""
    del seen_as_gpu
    return install_decode(site)


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """The measured table, to be filled by the test."""
    rows: list[Row] = []
    monkeypatch.setattr(tables, "rows_for", lambda _: tuple(rows))
    return rows


@pytest.fixture
def no_earlier_trace() -> Iterator[None]:
    """What torch.compile traces here no other test runs, nor the other way round."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
