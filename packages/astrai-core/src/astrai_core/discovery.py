# SPDX-License-Identifier: Apache-2.0
"""Finds the installed kernel families and checks that they can serve a device.

A family is an entry point of the group ``astrai.families`` whose value is a manifest module: it
imports neither torch nor native code, and says what the wheel contains. Manifests are read once, at
the first question. Native code is imported at the first call of one of its ops. Whatever goes wrong
with one family is kept as its reason and leaves the others alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from . import arch, device
from .reasons import Reason, ReasonKind, one_line

GROUP = "astrai.families"
CONTRACT = 1
"""The version of the manifest's and the ops' contract that this package speaks."""

# pip's cache may hold the very wheel that is to be replaced.
_REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps"
_lock = threading.RLock()


@dataclass
class Family:
    """An installed family, or one that could be.

    Attributes:
        name: short name, such as ``gemv``; the extra of astrai-core that installs it.
        distribution: name of the distribution.
        version: its version, or None when it is not installed.
        contract: the contract its manifest names.
        package: import name under which its ops resolve.
        native: import name of its compiled module.
        cuda: CUDA toolkit it was built with; None in a wheel without kernels.
        sass: architectures of its machine code.
        ptx: architectures of its PTX.
        ops: dtype names of each op.
        q_tile_rows: query rows of a tile of ``attn_paged_prefill``'s maps; None where the manifest
            does not say.
        reason: why it cannot be used on any device; None as far as is known.
    """

    name: str
    distribution: str
    version: str | None = None
    contract: int | None = None
    package: str | None = None
    native: str | None = None
    cuda: str | None = None
    sass: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    ops: dict[str, tuple[str, ...]] = field(default_factory=dict)
    q_tile_rows: int | None = None
    reason: Reason | None = None
    _resolved: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False)
    _on_device: dict[int, Reason | None] = field(default_factory=dict, repr=False)

    def reason_on(self, index: int) -> Reason | None:
        """Why the family cannot serve CUDA device `index`; None if it can. Cached per device."""
        if self.reason is not None:
            return self.reason
        if index not in self._on_device:
            self._on_device[index] = self._check_device(index)
        return self._on_device[index]

    def op(self, name: str) -> Callable[..., Any] | None:
        """The op, imported at the first call; None, with `reason` set, if that fails."""
        found = self._resolved.get(name)
        if found is None and self.reason is None:
            found = self._resolve(name)
        return found

    def _resolve(self, name: str) -> Callable[..., Any] | None:
        with _lock:
            try:
                package = importlib.import_module(str(self.package))
                # The package itself imports without it, and would fail at the first call only.
                importlib.import_module(str(self.native))
                self._resolved[name] = found = getattr(package, name)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 (whatever a broken wheel raises)
                self.reason = Reason(
                    ReasonKind.IMPORT_ERROR,
                    f"importing {self.package} failed: {one_line(error)}; {_reinstall(self)}",
                )
                return None
        return found  # type: ignore[no-any-return]

    def _check_device(self, index: int) -> Reason | None:
        capability = device.capability(index)
        if capability is None:
            return Reason(ReasonKind.NO_DEVICE, device.why_none())
        by_sass = arch.has_sass(capability, self.sass)
        if not by_sass and not arch.has_ptx(capability, self.ptx):
            ptx = [f"{a} (PTX)" for a in self.ptx]
            return Reason(
                ReasonKind.ARCHITECTURE,
                f"cuda:{index} is sm_{arch.name(capability)}, this {self.distribution} wheel has "
                f"code for {', '.join([*self.sass, *ptx])}; {_reinstall(self)}",
            )
        return self._check_driver(by_sass)

    def _check_driver(self, by_sass: bool) -> Reason | None:
        driver = device.driver_version()
        if driver is None or self.cuda is None:
            return None
        major, minor = (int(part) for part in self.cuda.split(".")[:2])
        # Machine code runs under any driver of its toolkit's major version; PTX is compiled by the
        # driver, which reads none that is newer than itself.
        if driver >= ((major, 0) if by_sass else (major, minor)):
            return None
        needs = f"CUDA {major}.x" if by_sass else f"CUDA {self.cuda} (to compile the wheel's PTX)"
        return Reason(
            ReasonKind.DRIVER,
            f"the driver supports CUDA {driver[0]}.{driver[1]}, {self.distribution} needs {needs}; "
            "install a newer NVIDIA driver",
        )


def families() -> tuple[Family, ...]:
    """Every family that astrai-core knows of or that is installed, in order of name.

    A family that cannot be used carries a `reason`; whether it serves a certain GPU is said by
    ``reason_on(index)``.
    """
    return tuple(_registry().values())


def family(name: str) -> Family:
    """One of `families()`.

    Raises:
        ValueError: there is none of that name.
    """
    try:
        return _registry()[name]
    except KeyError:
        known = ", ".join(_registry())
        raise ValueError(f"family: expected one of {known}, got {name!r}") from None


def find(name: str) -> Family:
    """A family by its name, which need not be installed, nor be offered as an extra."""
    return _registry().get(name) or _absent(name)


def forget() -> None:
    """Makes the next question read the installed distributions again."""
    with _lock:
        _read_all.cache_clear()


def _registry() -> dict[str, Family]:
    # The cache alone would let two first callers read, and keep different objects.
    with _lock:
        return _read_all()


@functools.cache
def _read_all() -> dict[str, Family]:
    found: dict[str, list[_Entry]] = {}
    for entry in _entries():
        found.setdefault(entry.point.name, []).append(entry)
    registry = {name: _read(name, entries) for name, entries in found.items()}
    registry |= {name: _absent(name) for name in _extras() if name not in registry}
    return dict(sorted(registry.items()))


class _Entry(NamedTuple):
    """An entry point of the group, and the distribution that has it."""

    point: importlib.metadata.EntryPoint
    distribution: str
    version: str


def _entries() -> Iterator[_Entry]:
    """The entry points of the group, one distribution at a time: another's may be unreadable."""
    names = set()
    for distribution in importlib.metadata.distributions():
        try:
            points = [*distribution.entry_points.select(group=GROUP)]
        except Exception:  # noqa: BLE001, S112 (whatever a broken distribution raises)
            continue
        if not points:
            continue
        name, version = _named(distribution, f"astrai-{points[0].name}")
        # The first one on sys.path is what an import finds; the same may stand there again.
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key not in names:
            names.add(key)
            yield from (_Entry(point, name, version) for point in points)


def _named(distribution: importlib.metadata.Distribution, otherwise: str) -> tuple[str, str]:
    try:
        metadata = distribution.metadata
        return metadata["Name"] or otherwise, metadata["Version"] or "unknown"
    except Exception:  # noqa: BLE001 (its metadata is broken, its manifest need not be)
        return otherwise, "unknown"


def _absent(name: str) -> Family:
    """A family that no entry point names: not installed, or installed without that."""
    distribution = _installed(f"astrai-{name}")
    if distribution is None:
        return _not_installed(name)
    result = Family(name, *_named(distribution, f"astrai-{name}"))
    try:
        missing = distribution.read_text("entry_points.txt") is None
        distribution.entry_points.select(group=GROUP)
        problem = "is missing" if missing else f"does not name {name} in [{GROUP}]"
    except Exception as error:  # noqa: BLE001 (whatever a broken distribution raises)
        problem = f"cannot be read ({one_line(error)})"
    text = f"entry_points.txt of {result.distribution} {result.version} {problem}"
    result.reason = Reason(ReasonKind.BAD_MANIFEST, f"{text}; {_reinstall(result)}")
    return result


def _installed(distribution: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(distribution)
    except Exception:  # noqa: BLE001 (there is none, or it is broken beyond being found)
        return None


def _not_installed(name: str) -> Family:
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        text = f'astrai-{name} is not installed; pip install "astrai-core[{name}]"'
    else:
        text = f"astrai-{name} is not made for {sys.platform} on {platform.machine()}"
    return Family(name, f"astrai-{name}", reason=Reason(ReasonKind.NOT_INSTALLED, text))


def _extras() -> Iterable[str]:
    """The families that this package's own metadata offers as extras."""
    try:
        metadata = importlib.metadata.metadata("astrai-core")
        requirements = "\n".join(metadata.get_all("Requires-Dist") or ())
        extras = metadata.get_all("Provides-Extra") or ()
    except Exception:  # noqa: BLE001 (imported from a source tree; or the metadata is broken)
        return ()
    return [
        extra
        for extra in extras
        if re.search(rf"^astrai-{re.escape(extra)}\b", requirements, re.MULTILINE)
    ]


def _read(name: str, entries: list[_Entry]) -> Family:
    point, distribution, version = entries[0]
    result = Family(name, distribution, version)
    if len(entries) > 1:
        owners = " and ".join(sorted(entry.distribution for entry in entries))
        result.reason = Reason(
            ReasonKind.DUPLICATE,
            # They may own the same files, which go with the first of them.
            f"{owners} both provide the family {name!r}; pip uninstall one of them, then "
            f"{_REINSTALL} the other",
        )
        return result
    if not all(part.isidentifier() for part in point.value.split(".")):
        what = f"expected the name of a module for {name}, got {point.value!r}"
        result.reason = Reason(
            ReasonKind.BAD_MANIFEST, f"entry_points.txt: {what}; {_reinstall(result)}"
        )
        return result
    try:
        manifest = point.load()
        _fill(result, manifest)
    except _BadManifestError as error:
        result.reason = Reason(
            ReasonKind.BAD_MANIFEST, f"{point.value}: {error}; {_reinstall(result)}"
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (whatever a broken manifest raises)
        result.reason = Reason(
            ReasonKind.IMPORT_ERROR,
            f"importing {point.value} failed: {one_line(error)}; {_reinstall(result)}",
        )
    return result


class _BadManifestError(Exception):
    pass


def _fill(result: Family, manifest: ModuleType) -> None:
    def field_of(name: str, *types: type) -> Any:
        value = getattr(manifest, name, _BadManifestError)
        if not isinstance(value, types) or isinstance(value, bool):
            expected = " or ".join("None" if t is type(None) else t.__name__ for t in types)
            found = "nothing" if value is _BadManifestError else repr(value)
            raise _BadManifestError(f"{name}: expected {expected}, got {found}")
        return value

    # The contract first: a later one may change what else there is.
    result.contract = field_of("CONTRACT", int)
    if result.contract != CONTRACT:
        newer = result.contract > CONTRACT
        command = "pip install -U astrai-core" if newer else f"pip install -U {result.distribution}"
        result.reason = Reason(
            ReasonKind.CONTRACT,
            f"{result.distribution} {result.version} speaks contract {result.contract}, "
            f"astrai-core speaks {CONTRACT}; {command}",
        )
        return
    if field_of("NAME", str) != result.name:
        raise _BadManifestError(f"NAME: expected {result.name!r}, got {manifest.NAME!r}")
    result.package = field_of("PACKAGE", str)
    result.native = field_of("NATIVE", str)
    result.cuda = field_of("CUDA", str, type(None))
    if result.cuda is not None and not re.match(r"[0-9]+\.[0-9]+(\.|$)", result.cuda):
        raise _BadManifestError(f"CUDA: expected a version such as '13.0', got {result.cuda!r}")
    result.sass = _arches("SASS", field_of("SASS", tuple))
    result.ptx = _arches("PTX", field_of("PTX", tuple))
    result.ops = _ops(field_of("OPS", dict))
    if hasattr(manifest, "Q_TILE_ROWS"):
        result.q_tile_rows = field_of("Q_TILE_ROWS", int)
        if result.q_tile_rows < 1:
            raise _BadManifestError(f"Q_TILE_ROWS: expected at least 1, got {result.q_tile_rows}")
    if result.cuda is None or not result.sass + result.ptx:
        result.reason = Reason(
            ReasonKind.NO_KERNELS,
            f"{result.distribution} was built without kernels (CSRC_KERNELS=false); "
            + _reinstall(result),
        )


def _arches(name: str, values: tuple[Any, ...]) -> tuple[str, ...]:
    for value in values:
        try:
            arch.parse(value)
        except (TypeError, ValueError) as error:  # noqa: PERF203
            raise _BadManifestError(f"{name}: {error}") from error
    return values


def _ops(ops: dict[Any, Any]) -> dict[str, tuple[str, ...]]:
    for op, dtypes in ops.items():
        names = (op, *dtypes) if isinstance(dtypes, tuple) else (None,)
        if not all(isinstance(name, str) for name in names):
            raise _BadManifestError(
                f"OPS: expected a tuple of dtype names for each op, got {op!r}: {dtypes!r}"
            )
    return dict(ops)


def _reinstall(family: Family) -> str:
    return f"{_REINSTALL} {family.distribution}"
