# SPDX-License-Identifier: Apache-2.0
"""The tasks: each module without a leading underscore has one, as SPEC."""

from __future__ import annotations

import importlib
import pkgutil

from mega_factory.spec import MegaSpec


def load_all() -> dict[str, MegaSpec]:
    """Every task by its name, each validated where it is defined."""
    specs = {}
    for module in sorted(entry.name for entry in pkgutil.iter_modules(__path__)):
        if module.startswith("_"):
            continue
        spec: MegaSpec = importlib.import_module(f"{__name__}.{module}").SPEC
        if spec.name.replace("-", "_") != module:
            raise ValueError(f"specs/{module}.py: expected a spec of its name, got {spec.name}")
        specs[spec.name] = spec
    return specs


def load(name: str) -> MegaSpec:
    """The task of a name.

    Raises:
        ValueError: there is none.
    """
    specs = load_all()
    if name not in specs:
        raise ValueError(f"spec: expected one of {', '.join(specs)}, got {name}")
    return specs[name]
