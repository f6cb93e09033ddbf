# SPDX-License-Identifier: Apache-2.0
"""Rules about source text that no linter has: layers, length of files, package indexes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNEL_SUFFIXES = {".cu", ".cuh", ".h", ".cpp"}
MAX_LINES = {".py": 400} | dict.fromkeys(KERNEL_SUFFIXES, 600)

# Below Python a tensor is a DLPack view: a wheel that links torch works with one torch build.
TORCH_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](?:torch|ATen|c10)/')
# Packages of ours: one that is named in the sources of another may be imported by that name, out of
# sight of the import contracts.
OURS = re.compile(r"\bastrai_(?:core|attention|fp8|gemv|megakernel)\b")
# Where packages come from is the business of the machine's own pip configuration.
INDEX = re.compile(r"\b(?:index[-_]url|find[-_]links)\b\W{0,5}(?:https?|file)://", re.IGNORECASE)


def tracked() -> list[Path]:
    """Every file of the repository that is, or would be, committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listing.split("\0") if name)
    return sorted({path for path in paths if path.is_file() and not path.is_symlink()})


def errors_in(path: Path) -> list[str]:
    """What is wrong with one file, as `path:line: reason`."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        return []
    name = path.relative_to(ROOT)
    errors = []
    limit = MAX_LINES.get(path.suffix)
    package = path.suffix == ".py" and re.search(r"/src/(astrai_\w+)/", path.as_posix())
    if limit and len(lines) > limit:
        errors.append(f"{name}: {len(lines)} lines, more than {limit}: split it")
    for number, line in enumerate(lines, 1):
        if path.suffix in KERNEL_SUFFIXES and TORCH_INCLUDE.search(line):
            errors.append(f"{name}:{number}: a torch header below Python")
        if package and set(OURS.findall(line)) - {package[1]}:
            errors.append(f"{name}:{number}: names another package than {package[1]}")
        if INDEX.search(line):
            errors.append(f"{name}:{number}: names a package index")
    return errors


def main() -> int:
    """Prints every violation; exit status 1 if there is one."""
    errors = [error for path in tracked() for error in errors_in(path)]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
