# SPDX-License-Identifier: Apache-2.0
"""``python -m astrai_core doctor``: what this machine has, what is used, and why not the rest."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any

import torch

from . import arch, device, tables
from .checks import checks_on
from .discovery import CONTRACT, families
from .policy import VARIABLES, mode


def diagnose() -> dict[str, Any]:
    """Everything the doctor knows, as JSON types; calls each op on each device."""
    driver = device.driver_version()
    gpus = []
    for index in range(device.count()):
        capability = device.capability(index)
        if capability is None:
            continue
        name = f"sm_{arch.name(capability)}"
        table = name if capability in tables.available() else "inherited"
        gpus.append({"index": index, "name": torch.cuda.get_device_name(index), "arch": name})
        gpus[-1]["table"] = table if tables.rows_for(capability) else "none"
    checks = [check for place in _places() for check in checks_on(place)]
    return {
        "machine": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "driver_cuda": None if driver is None else f"{driver[0]}.{driver[1]}",
            "no_gpu_because": None if gpus else device.why_none(),
        },
        "astrai_core": {"version": _version(), "contract": CONTRACT},
        "gpus": gpus,
        "selection": {variable: _mode(op) for op, (variable, _) in VARIABLES.items()},
        "families": [_family(f) for f in families()],
        "checks": [vars(check) for check in checks],
    }


def healthy(report: dict[str, Any]) -> bool:
    """False if a GPU is present and an installed family cannot run on it, or a call on it fails."""
    if not report["gpus"]:
        return True
    installed = [f for f in report["families"] if f["version"] is not None]
    broken = any(f["reason"] or f["reason_by_gpu"] for f in installed)
    return not broken and not any(check["error"] for check in report["checks"])


def _mode(op: str) -> str:
    try:
        return mode(op)
    except ValueError as error:
        return str(error)


def _version() -> str:
    try:
        return metadata.version("astrai-core")
    except Exception:  # noqa: BLE001 (there is none, or it is broken)
        return "source tree"


def _family(found: Any) -> dict[str, Any]:
    by_gpu = {}
    # The module is loaded here, so that a broken one is named even where no call would use it.
    for op in found.ops:
        found.op(op)
    for index in range(device.count()):
        if found.reason is None and (reason := found.reason_on(index)) is not None:
            by_gpu[f"cuda:{index}"] = {"kind": reason.kind.value, "text": reason.text}
    reason = found.reason
    return {
        "name": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "contract": found.contract,
        "cuda": found.cuda,
        "sass": list(found.sass),
        "ptx": list(found.ptx),
        "ops": {op: list(dtypes) for op, dtypes in found.ops.items()},
        "reason": reason and {"kind": reason.kind.value, "text": reason.text},
        "reason_by_gpu": by_gpu,
    }


def _places() -> list[torch.device]:
    gpus = [torch.device("cuda", index) for index in range(device.count())]
    return gpus or [torch.device("cpu")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subcommand's arguments."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis; 0 if all that is installed can run on the GPUs that are present."""
    report = diagnose()
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0 if healthy(report) else 1


def _text(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        (
            f"python {machine['python']}, torch {machine['torch']} (CUDA {machine['torch_cuda']}), "
            f"driver for CUDA {machine['driver_cuda']}"
        ),
        f"astrai-core {report['astrai_core']['version']}",
        "",
        "GPUs",
    ]
    lines += [
        f"  cuda:{gpu['index']}  {gpu['name']}  {gpu['arch']}  table: {gpu['table']}"
        for gpu in report["gpus"]
    ]
    if machine["no_gpu_because"]:
        lines.append(f"  none: {machine['no_gpu_because']}")
    lines += ["", "Families"]
    for found in report["families"]:
        version = found["version"] or "-"
        lines.append(f"  {found['name']:<11} {version}")
        if found["cuda"]:
            images = [*found["sass"], *(f"{ptx} (PTX)" for ptx in found["ptx"])]
            lines.append(f"    CUDA {found['cuda']}, code for {', '.join(images)}")
            lines.append(f"    ops: {', '.join(found['ops'])}")
        if found["reason"]:
            lines.append(f"    not used: {found['reason']['text']}")
        for where, reason in found["reason_by_gpu"].items():
            lines.append(f"    not used on {where}: {reason['text']}")
    lines += ["", "Ops"]
    for check in report["checks"]:
        outcome = check["error"] or f"right (relative error {check['relative_error']:.1e})"
        lines.append(
            f"  {check['op']:<18} {check['device']:<7} {check['demanded']}: "
            f"{check['chosen'] or 'failed'}, {outcome}"
        )
        lines += [f"    {name}: {why}" for name, why in check["passed_over"].items()]
    for variable, value in report["selection"].items():
        # A wrong value is a sentence, which names its variable itself.
        lines.append(f"  {value}" if value.startswith(variable) else f"  {variable}={value}")
    return "\n".join(lines)
