# SPDX-License-Identifier: Apache-2.0
"""Looks at the machine code of a family, for GPUs that no machine here has too.

``check_machine_code.py NVCC FAMILY`` compiles each kernel for some architectures, with the
compiler's own report, and disassembles it (cuobjdump and nvdisasm, on PATH). The status is 1 if a
kernel spills registers or has a copy that the compiler encodes wrongly, or if one of matrix
products has no tensor-core instruction or no asynchronous copy.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = ("80", "89", "90a")

# Kernels of matrix products, and what their code must have.
PRODUCTS = re.compile(r"\d(?:gemv|decode|prefill)_kernel")
EXPECTED = ("HMMA.16816.F32.BF16", "LDGSTS")

# Unaligned rows with K above 4,096, where two CTAs for an SM leave them too few registers.
MAY_SPILL = re.compile(r"gemv_kernelILN\w+RowSourceE1ELb0")
MAY_SPILL_ON = "sm_90a"

# cp.async with an L2 policy to [register + uniform register]: for sm_90 nvcc 13.0 encodes UR0 and
# UR1 whatever it has put offset and policy into, and the device finds an illegal instruction.
WRONG_COPY = "LDGSTS [R+UR0]"

REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """What the compiler said of a kernel."""

    name: str
    arch: str
    spilled: int  # bytes
    registers: int

    @property
    def may_spill(self) -> bool:
        """Whether it is known to."""
        return self.arch == MAY_SPILL_ON and bool(MAY_SPILL.search(self.name))


def kernels(report: str) -> Iterator[Kernel]:
    """Of what ``nvcc -Xptxas -v`` printed."""
    for found in REPORT.finditer(report):
        spilled = int(found["stores"]) + int(found["loads"])
        yield Kernel(found["kernel"], found["arch"], spilled, int(found["registers"]))


def instructions(disassembly: str) -> dict[str, set[str]]:
    """The opcodes of each function of what ``cuobjdump -sass`` printed, and `WRONG_COPY`."""
    found: dict[str, set[str]] = {}
    for part in disassembly.split("Function : ")[1:]:
        name, _, code = part.partition("\n")
        opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code)
        wrong = re.search(r"LDGSTS\S* \[R\d+\+UR0\b.*desc\[UR1\]", code)
        found[name.strip()] = {*opcodes, *([WRONG_COPY] if wrong else [])}
    return found


def errors(reported: list[Kernel], code: dict[str, set[str]]) -> list[str]:
    """What is wrong with the kernels of one file."""
    found = [
        f"{kernel.name}: {kernel.spilled} bytes of registers spilled"
        for kernel in reported
        if kernel.spilled and not kernel.may_spill
    ]
    for kernel in reported:
        opcodes = code.get(kernel.name, set())
        if WRONG_COPY in opcodes:
            found.append(f"{kernel.name}: {WRONG_COPY}, which is encoded wrongly")
        # No plan launches it on this architecture: it only traps.
        if not PRODUCTS.search(kernel.name) or ("BPT.TRAP" in opcodes and len(opcodes) < 8):
            continue
        found += [
            f"{kernel.name}: no {opcode}"
            for opcode in EXPECTED
            if not any(name.startswith(opcode) for name in opcodes)
        ]
    return found


def main() -> int:
    """Compiles and judges; prints a line for each file."""
    nvcc, family = sys.argv[1], Path(sys.argv[2])
    csrc, failed = family / "csrc", []
    sources = sorted(path for path in csrc.rglob("*.cu") if path.parent.name != "tests")
    for arch in ARCHITECTURES:
        for source in sources:
            with tempfile.TemporaryDirectory() as folder:
                cubin = Path(folder, "a.cubin")
                includes = [f"-I{csrc}", f"-I{family / 'shared_csrc' / 'include'}"]
                command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{arch}", "-Xptxas", "-v"]
                done = subprocess.run(
                    [*command, *includes, "-cubin", "-o", cubin, source],
                    check=True, capture_output=True, text=True,
                )  # fmt: skip
                disassembled = subprocess.run(
                    ["cuobjdump", "-sass", cubin], check=True, capture_output=True, text=True
                )
            found = list(kernels(done.stderr + done.stdout))
            most = max((kernel.registers for kernel in found), default=0)
            name = source.relative_to(csrc)
            print(f"sm_{arch} {name}: {len(found)} kernels, up to {most} registers", flush=True)
            code = instructions(disassembled.stdout)
            failed += [f"sm_{arch} {name}: {error}" for error in errors(found, code)]
    print(*failed, sep="\n", end="\n" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
