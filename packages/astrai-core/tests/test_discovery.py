# SPDX-License-Identifier: Apache-2.0
"""Every reason for which a family is not used, and that one broken family harms no other."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from astrai_core import device, discovery
from astrai_core.discovery import families, family
from astrai_core.reasons import Reason, ReasonKind
from conftest import EXTENSION, NATIVE, Site

REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps astrai-gemv"
UNSPEAKABLE = """
class Unspeakable(Exception):
    def __str__(self):
        raise KeyError("text")
raise Unspeakable
"""
Gpus = Callable[..., None]


def expect(reason: Reason | None, kind: ReasonKind, *parts: str) -> None:
    assert reason is not None and reason.kind is kind
    assert all(part in str(reason) for part in parts), str(reason)
    assert "\n" not in str(reason)


def test_a_usable_family(site: Site, gpus: Gpus) -> None:
    package = site.add(version="0.1.7")
    gpus((9, 0))
    found = family("gemv")
    assert (found.name, found.distribution, found.version) == ("gemv", "astrai-gemv", "0.1.7")
    assert (found.contract, found.package, found.cuda) == (discovery.CONTRACT, package, "13.0")
    assert (found.sass, found.ptx) == (("80", "89", "90a"), ("80",))
    assert found.ops == {"bf16_gemv": ("bfloat16",), "bf16_swiglu": ("bfloat16",)}
    assert found.reason is None and found.reason_on(0) is None
    assert found.op("bf16_gemv") is site.native_of(package).bf16_gemv


def test_families_are_sorted_and_name_what_could_be_installed(site: Site) -> None:
    site.add("zeta")
    site.add("alpha")
    names = [found.name for found in families()]
    assert names == sorted(names) and {"alpha", "attention", "gemv", "zeta"} <= {*names}


def test_not_installed(site: Site) -> None:  # noqa: ARG001 (it hides what is installed)
    found = family("gemv")
    expect(found.reason, ReasonKind.NOT_INSTALLED, 'pip install "astrai-core[gemv]"')
    assert found.version is None and found.op("bf16_gemv") is None
    assert found.reason_on(0) is found.reason


def test_an_unknown_name_is_an_error(site: Site) -> None:
    site.add("alpha")
    with pytest.raises(ValueError, match=r"expected one of alpha, .*, got 'nothing'"):
        family("nothing")


def test_forget_reads_again(site: Site) -> None:
    before = family("gemv")
    assert family("gemv") is before
    site.add()
    assert family("gemv").reason is None


def test_duplicates_are_named(site: Site) -> None:
    site.add()
    site.add(distribution="gemv-fork", package="standin_fork")
    expect(
        family("gemv").reason,
        ReasonKind.DUPLICATE,
        "astrai-gemv and gemv-fork both provide the family 'gemv'",
        "; pip uninstall one of them, then " + REINSTALL.replace("astrai-gemv", "the other"),
    )
    assert "standin_gemv" not in sys.modules and "standin_fork" not in sys.modules


def test_one_distribution_that_is_seen_twice_is_no_duplicate(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add()
    once = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [*once(), *once()])
    assert family("gemv").reason is None


@pytest.mark.parametrize(
    "files",
    [
        {"METADATA": b"Name: other", "entry_points.txt": b"[\xff]\n\xfe = x"},
        {"METADATA": b"Name: other", "entry_points.txt": b"[astrai.families]\ngemv\n"},
        {"METADATA": b"\xff\xfe\0"},
        {"entry_points.txt": b"[console_scripts]\na = b:c"},
        {},
    ],
)
def test_a_corrupt_distribution_of_another_leaves_families_alone(
    site: Site, files: dict[str, bytes]
) -> None:
    info = site.folder / "aaa_other-1.0.dist-info"
    info.mkdir()
    for name, content in files.items():
        (info / name).write_bytes(content)
    site.add()
    found = family("gemv")
    assert found.reason is None and found.version == "0.1.0"


@pytest.mark.parametrize("metadata", [None, b"\xff\xfe", b"Metadata-Version: 2.1\n"])
def test_a_family_without_readable_metadata_has_no_version(
    site: Site, metadata: bytes | None
) -> None:
    site.add()
    path = site.folder / "astrai_gemv-0.1.0.dist-info" / "METADATA"
    path.unlink()
    if metadata is not None:
        path.write_bytes(metadata)
    discovery.forget()
    found = family("gemv")
    assert (found.distribution, found.version) == ("astrai-gemv", "unknown")
    assert found.reason is None


def test_two_first_callers_get_the_same_families(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add()
    fill = discovery._fill

    def slow(result: discovery.Family, manifest: ModuleType) -> None:
        time.sleep(0.05)
        fill(result, manifest)

    monkeypatch.setattr(discovery, "_fill", slow)
    seen: list[discovery.Family] = []
    threads = [threading.Thread(target=lambda: seen.append(family("gemv"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 3 and len({id(found) for found in seen}) == 1


@pytest.mark.parametrize(
    "name", ["NAME", "CONTRACT", "PACKAGE", "NATIVE", "CUDA", "SASS", "PTX", "OPS"]
)
@pytest.mark.parametrize("spoil", ["{} = 1.5", "{} = True", "del {}"])
def test_a_manifest_with_a_wrong_or_missing_attribute(site: Site, name: str, spoil: str) -> None:
    site.add(manifest_text=spoil.format(name))
    found = "nothing" if "del" in spoil else spoil.rpartition(" ")[2]
    expect(
        family("gemv").reason,
        ReasonKind.BAD_MANIFEST,
        f"standin_gemv._family: {name}: expected",
        f"got {found}",
        REINSTALL,
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("CUDA", "13", "expected a version such as '13.0', got '13'"),
        ("CUDA", "thirteen", "got 'thirteen'"),
        ("NAME", "other", "expected 'gemv', got 'other'"),
        ("SASS", ("80", "sm_90"), "got 'sm_90'"),
        ("PTX", (80,), "PTX: "),
        ("PTX", "80", "expected tuple, got '80'"),
        ("Q_TILE_ROWS", "64", "expected int, got '64'"),
        ("Q_TILE_ROWS", 0, "expected at least 1, got 0"),
    ],
)
def test_a_manifest_with_a_wrong_value(site: Site, name: str, value: object, text: str) -> None:
    site.add(**{name: value})
    expect(family("gemv").reason, ReasonKind.BAD_MANIFEST, name, text, REINSTALL)


@pytest.mark.parametrize(
    ("difference", "command"),
    [(1, "pip install -U astrai-core"), (-1, "pip install -U astrai-gemv")],
)
def test_another_contract(site: Site, difference: int, command: str) -> None:
    # A manifest of another contract may lack what this one requires.
    contract = discovery.CONTRACT + difference
    site.add(CONTRACT=contract, manifest_text="del OPS, NATIVE, SASS")
    reason = family("gemv").reason
    expect(
        reason,
        ReasonKind.CONTRACT,
        f"astrai-gemv 0.1.0 speaks contract {contract}, astrai-core speaks {discovery.CONTRACT}",
    )
    assert str(reason).endswith(f"; {command}")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("raise OSError('no\\n  such file')", "OSError: no such file"),
        ("import no_such_module_at_all", "no_such_module_at_all"),
        ("1 +", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (UNSPEAKABLE, "Unspeakable: its text raises KeyError"),
    ],
)
def test_a_manifest_that_cannot_be_imported(site: Site, text: str, part: str) -> None:
    site.add(manifest_text=text)
    expect(family("gemv").reason, ReasonKind.IMPORT_ERROR, part, REINSTALL)


@pytest.mark.parametrize(
    ("native", "part"),
    [
        ({}, "_native"),
        ({EXTENSION: "this is no shared object\n"}, "ImportError"),
        ({"_native.py": "raise RuntimeError('undefined symbol')"}, "undefined symbol"),
        ({"_native.py": "raise SystemExit('no license')"}, "SystemExit: no license"),
        ({"_native.py": UNSPEAKABLE}, "Unspeakable: its text raises KeyError"),
        ({"_native.py": NATIVE.replace("bf16_gemv", "gemv_of_old")}, "bf16_gemv"),
    ],
    ids=[
        "missing",
        "overwritten with text",
        "raises",
        "exits",
        "raises what has no text",
        "lacks the op",
    ],
)
def test_a_broken_native_module(site: Site, gpus: Gpus, native: dict[str, str], part: str) -> None:
    site.add(native=native)
    gpus((9, 0))
    found = family("gemv")
    assert found.reason is None and found.reason_on(0) is None
    assert found.op("bf16_gemv") is None
    expect(found.reason, ReasonKind.IMPORT_ERROR, part, "importing standin_gemv failed", REINSTALL)
    assert found.reason_on(0) is found.reason


@pytest.mark.parametrize("where", ["manifest", "native"])
def test_an_interrupt_is_not_taken_for_a_broken_family(site: Site, where: str) -> None:
    text = "raise KeyboardInterrupt"
    site.add(**{"manifest_text": text} if where == "manifest" else {"native": {"_native.py": text}})  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        family("gemv").op("bf16_gemv")


def test_a_package_that_resolves_nothing_itself_still_needs_its_native_module(site: Site) -> None:
    package = site.add(native={})
    init = site.folder / package / "__init__.py"
    init.write_text("def bf16_gemv(*operands): ...\n", "utf-8")
    found = family("gemv")
    assert found.op("bf16_gemv") is None
    expect(found.reason, ReasonKind.IMPORT_ERROR, "_native")


@pytest.mark.parametrize(
    "manifest", [{"CUDA": None, "SASS": (), "PTX": ()}, {"CUDA": None}, {"SASS": (), "PTX": ()}]
)
def test_a_wheel_without_kernels(site: Site, manifest: dict[str, object]) -> None:
    site.add(**manifest)
    expect(family("gemv").reason, ReasonKind.NO_KERNELS, "CSRC_KERNELS=false", REINSTALL)


@pytest.mark.parametrize(
    ("capability", "cuda", "driver", "served"),
    [
        ((9, 0), "13.0", (13, 0), True),
        ((9, 0), "13.1", (13, 0), True),  # machine code needs the major version only
        ((9, 0), "12.9", (13, 0), True),
        ((9, 0), "13.0", None, True),  # nothing is known of the driver: it is tried
        ((9, 0), "13.0", (12, 8), False),
        ((12, 0), "13.0", (13, 0), True),
        ((12, 0), "13.1", (13, 1), True),
        ((12, 0), "13.1", (13, 0), False),  # PTX needs the minor version too
        ((12, 0), "13.0", (12, 8), False),
    ],
)
def test_the_driver(
    site: Site,
    gpus: Gpus,
    capability: tuple[int, int],
    cuda: str,
    driver: tuple[int, int] | None,
    served: bool,
) -> None:
    site.add(CUDA=cuda)
    gpus(capability, driver=driver)
    reason = family("gemv").reason_on(0)
    if served:
        assert reason is None
    else:
        needs = "CUDA 13.x" if capability == (9, 0) else f"CUDA {cuda} (to compile the wheel's PTX)"
        supports = f"the driver supports CUDA {'.'.join(map(str, driver or ()))}"
        expect(reason, ReasonKind.DRIVER, supports, f"astrai-gemv needs {needs}")


def test_an_architecture_that_is_not_in_the_wheel(site: Site, gpus: Gpus) -> None:
    site.add(SASS=("90a",), PTX=("89",))
    gpus((8, 6), (9, 0))
    found = family("gemv")
    expect(
        found.reason_on(0),
        ReasonKind.ARCHITECTURE,
        "cuda:0 is sm_86",
        "has code for 90a, 89 (PTX)",
        REINSTALL,
    )
    assert found.reason is None and found.reason_on(1) is None


@pytest.mark.parametrize("index", [-1, 1])
def test_no_such_device(site: Site, gpus: Gpus, index: int) -> None:
    site.add()
    gpus((9, 0))
    expect(family("gemv").reason_on(index), ReasonKind.NO_DEVICE, device.why_none())


def test_why_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.torch.version, "cuda", None)
    assert "built without CUDA" in device.why_none() and device.count() == 0
    monkeypatch.setattr(device.torch.version, "cuda", "13.0")
    assert "CUDA_VISIBLE_DEVICES" in device.why_none()


def test_every_kind_of_reason_is_tested() -> None:
    text = Path(__file__).read_text("utf-8")
    assert [kind.name for kind in ReasonKind if f"ReasonKind.{kind.name}," not in text] == []


@pytest.mark.parametrize(
    "broken",
    [
        {"manifest_text": "raise KeyError"},
        {"manifest_text": "del NAME"},
        {"CONTRACT": 99},
        {"native": {EXTENSION: "text"}},
    ],
)
def test_a_broken_family_leaves_the_others_alone(
    site: Site, gpus: Gpus, broken: dict[str, object]
) -> None:
    site.add("broken", **broken)  # type: ignore[arg-type]
    site.add()
    gpus((9, 0))
    assert family("broken").op("bf16_gemv") is None and family("broken").reason is not None
    assert family("gemv").op("bf16_gemv") is not None and family("gemv").reason_on(0) is None


def test_reading_manifests_imports_no_native_code(site: Site, gpus: Gpus) -> None:
    package = site.add()
    gpus((9, 0))
    found = family("gemv")
    assert found.reason_on(0) is None
    assert f"{package}._family" in sys.modules and f"{package}._native" not in sys.modules
    assert found.op("bf16_gemv") is not None and f"{package}._native" in sys.modules


def test_importing_the_package_reads_no_manifest(
    site: Site, run_python: Callable[..., str]
) -> None:
    package = site.add()
    script = f"""
import sys
sys.path.insert(0, {str(site.folder)!r})
import astrai_core
loaded = [m for m in sys.modules if m == {package!r} or m == "astrai_gemv"]
assert not loaded, loaded
assert astrai_core.discovery._read_all.cache_info().currsize == 0
names = [found.name for found in astrai_core.families()]
assert "gemv" in names
# With the real family installed too there are two, and neither is imported.
found = astrai_core.discovery.family("gemv")
print({package!r} + "._family" in sys.modules or found.reason.kind.value)
"""
    assert run_python(script).strip() in ("True", "duplicate")
