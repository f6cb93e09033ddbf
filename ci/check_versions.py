# SPDX-License-Identifier: Apache-2.0
"""Validates versions.json, and that every file which must repeat a number from it agrees."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LINUX_ONLY = (
    "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
)

ARCH = r"\d+a?"
SHAPE = {
    "python": {"supported": [r"3\.\d+"]},
    "torch": {"minimum": r"\d+\.\d+", "tested": r"\d+\.\d+\.\d+"},
    "cuda": {"toolkit": r"\d+\.\d+"},
    "families": {"*": {"sass": [ARCH], "ptx": [r"\d+"], "tested": [rf"{ARCH}|\d+-virtual"]}},
    "pins": {"*": r"[0-9.]+"},
}


def shape_errors(value: Any, shape: Any, where: str) -> list[str]:
    """What in `value` departs from `shape`: a pattern, a list of one, or a table ("*": any key)."""
    if isinstance(shape, str):
        if not isinstance(value, str) or not re.fullmatch(shape, value):
            return [f"{where}: expected a string like {shape}, got {value!r}"]
        return []
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where}: expected a list, got {value!r}"]
        return [e for i, v in enumerate(value) for e in shape_errors(v, shape[0], f"{where}[{i}]")]
    if not isinstance(value, dict):
        return [f"{where}: expected a table, got {value!r}"]
    if "*" in shape:
        shape = dict.fromkeys(value, shape["*"])
    errors = [f"{where}.{key}: missing" for key in shape.keys() - value.keys()]
    errors += [f"{where}.{key}: unknown" for key in value.keys() - shape.keys()]
    for key in sorted(shape.keys() & value.keys()):
        errors += shape_errors(value[key], shape[key], f"{where}.{key}")
    return errors


def architecture_key(arch: str) -> tuple[int, str]:
    """Orders architectures as a CMakeLists.txt lists them: 80 before 90a before 100."""
    return int(arch.rstrip("a")), arch


def package_errors(versions: dict[str, Any], folder: Path) -> list[str]:
    """Departures of one package's metadata from the matrix."""
    text = (folder / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    where = folder.name
    errors = []
    oldest = versions["python"]["supported"][0]
    if project["requires-python"] != f">={oldest}":
        errors.append(f"{where}: requires-python is not >={oldest}")
    floor = f"torch>={versions['torch']['minimum']}"
    if floor not in project.get("dependencies", []):
        errors.append(f"{where}: dependencies lack {floor}")
    if (folder / "LICENSE").read_text() != (ROOT / "LICENSE").read_text():
        errors.append(f"{where}: LICENSE differs from the repository's")
    if "cuda-toolkit[" in text:
        pin = f"cuda-toolkit[nvcc,cudart,crt,nvvm,cccl]=={versions['cuda']['toolkit']}.*"
        if pin not in text:
            errors.append(f"{where}: the compiler from PyPI is not {pin}")
    return errors


def family_errors(
    name: str, family: dict[str, list[str]], extras: dict[str, list[str]]
) -> list[str]:
    """Departures of one family's build files, and of core's extra for it, from the matrix."""
    distribution = f"astrai-{name}"
    errors = []
    wanted = [*family["sass"], *(f"{arch}-virtual" for arch in family["ptx"])]
    if family["sass"] != sorted(family["sass"], key=architecture_key):
        errors.append(f"families.{name}.sass: not in order")
    errors += [
        f"families.{name}.tested: {a} is not built" for a in family["tested"] if a not in wanted
    ]
    cmake = (ROOT / "packages" / distribution / "CMakeLists.txt").read_text()
    found = re.search(r"\bARCHITECTURES\s+((?:[0-9]\S*\s+)+)", cmake)
    if found is None or found.group(1).split() != wanted:
        errors.append(f"{distribution}/CMakeLists.txt: ARCHITECTURES are not {' '.join(wanted)}")
    extra = rf"{distribution}>=\d+\.\d+,<\d+\.\d+; {re.escape(LINUX_ONLY)}"
    if not any(re.fullmatch(extra, requirement) for requirement in extras.get(name, [])):
        errors.append(f"astrai-core: extra [{name}] has no bounded {distribution}; {LINUX_ONLY}")
    if not any(re.search(rf"[\[,]{name}[\],]", requirement) for requirement in extras["all"]):
        errors.append(f"astrai-core: extra [all] lacks {name}")
    for config in ("ci/importlinter.ini", "ci/mypy.ini"):
        if f"astrai_{name}" not in (ROOT / config).read_text().replace("-", "_"):
            errors.append(f"{config}: does not cover {distribution}")
    return errors


def main() -> int:
    """Prints every disagreement; exit status 1 if there is one."""
    versions = json.loads((ROOT / "ci/versions.json").read_text())
    errors = shape_errors(versions, SHAPE, "versions.json")
    if not errors:
        packages = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
        errors = [error for folder in packages for error in package_errors(versions, folder)]
        core = tomllib.loads((ROOT / "packages/astrai-core/pyproject.toml").read_text())
        extras = core["project"]["optional-dependencies"]
        for name, family in versions["families"].items():
            errors += family_errors(name, family, extras)
        unlisted = {path.name for path in packages} - {f"astrai-{f}" for f in versions["families"]}
        errors += [f"versions.json: no family {name}" for name in unlisted - {"astrai-core"}]
        errors += [
            f".pre-commit-config.yaml: nox is not {versions['pins']['nox']}"
            for line in (ROOT / ".pre-commit-config.yaml").read_text().splitlines()
            if "nox==" in line and f"nox=={versions['pins']['nox']}" not in line
        ]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
