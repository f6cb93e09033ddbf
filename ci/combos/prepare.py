# SPDX-License-Identifier: Apache-2.0
"""Turns a folder of real wheels into the local index of one combination.

``prepare.py COMBO INDEX`` changes the wheels in INDEX where the combination calls for it, and
writes requirements.txt there. A changed wheel is packed anew, so that its RECORD is right.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FAMILY = "astrai_gemv"


def unpack(wheel: Path, folder: Path) -> Path:
    """The root of an unpacked wheel."""
    subprocess.run([sys.executable, "-m", "wheel", "unpack", wheel, "-d", folder], check=True)
    (root,) = folder.iterdir()
    return root


def pack(root: Path, index: Path) -> None:
    """Writes an unpacked wheel into an index."""
    subprocess.run([sys.executable, "-m", "wheel", "pack", root, "-d", index], check=True)


def substitute(path: Path, pattern: str, replacement: str) -> None:
    """Replaces the one match of a pattern in a file."""
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{path}: {count} matches of {pattern!r}, expected one")
    path.write_text(text)


def newer_contract(root: Path) -> None:
    """The manifest of a family made for a later core."""
    substitute(root / FAMILY / "_family.py", r"^CONTRACT = \d+$", "CONTRACT = 99")


def missing_module(root: Path) -> None:
    """A wheel whose native module was lost."""
    next((root / FAMILY).glob("*.so")).unlink()


def broken_module(root: Path) -> None:
    """A wheel whose native module is no module."""
    next((root / FAMILY).glob("*.so")).write_text("not a shared object\n")


def duplicate(root: Path) -> None:
    """A second distribution that provides the same family."""
    (info,) = root.glob("*.dist-info")
    substitute(info / "METADATA", r"^Name: astrai-gemv$", "Name: astrai-gemv-nightly")
    info.rename(info.with_name(info.name.replace(FAMILY, f"{FAMILY}_nightly")))


CHANGES = {
    "newer_contract": newer_contract,
    "missing_module": missing_module,
    "broken_module": broken_module,
    "duplicate": duplicate,
}
REQUIREMENTS = {
    "attention_alone": ["astrai-attention"],
    "core_alone": ["astrai-core"],
    "gemv_alone": ["astrai-gemv"],
    "two_families": ["astrai-core[attention,gemv]"],
    "duplicate": ["astrai-core[gemv]", "astrai-gemv-nightly"],
}


def main() -> None:
    """Changes the index, writes the requirements."""
    combo, index = sys.argv[1], Path(sys.argv[2])
    if combo in CHANGES:
        (wheel,) = index.glob(f"{FAMILY}-*.whl")
        with tempfile.TemporaryDirectory() as folder:
            root = unpack(wheel, Path(folder))
            if combo != "duplicate":
                wheel.unlink()
            CHANGES[combo](root)
            pack(root, index)
    Path(index, "requirements.txt").write_text(
        "\n".join(REQUIREMENTS.get(combo, ["astrai-core[gemv]"])) + "\n"
    )


if __name__ == "__main__":
    main()
