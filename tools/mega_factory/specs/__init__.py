# SPDX-License-Identifier: Apache-2.0
"""The tasks: each module without a leading underscore has one, as SPEC."""

from __future__ import annotations

import importlib
import pkgutil

from mega_factory.spec import MegaSpec


def names() -> list[str]:
    """Of every task, none of them imported."""
    modules = sorted(entry.name for entry in pkgutil.iter_modules(__path__))
    return [name.replace("_", "-") for name in modules if not name.startswith("_")]


def load_all() -> dict[str, MegaSpec]:
    """Every task by its name, each validated where it is defined."""
    return {name: load(name) for name in names()}


def load(name: str) -> MegaSpec:
    """The task of a name; no other is imported.

    Raises:
        ValueError: there is none, or its module has the spec of another.
    """
    if name not in (known := names()):
        raise ValueError(f"spec: expected one of {', '.join(known)}, got {name}")
    module = name.replace("-", "_")
    spec: MegaSpec = importlib.import_module(f"{__name__}.{module}").SPEC
    if spec.name != name:
        raise ValueError(f"specs/{module}.py: expected a spec of its name, got {spec.name}")
    return spec
