# SPDX-License-Identifier: Apache-2.0
"""Why a family cannot be used: a kind for programs, a sentence for people."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReasonKind(str, enum.Enum):
    """The causes that keep a family from serving calls."""

    NOT_INSTALLED = "not_installed"
    DUPLICATE = "duplicate"
    BAD_MANIFEST = "bad_manifest"
    CONTRACT = "contract_mismatch"
    IMPORT_ERROR = "import_error"
    NO_KERNELS = "no_kernels"
    DRIVER = "driver_too_old"
    ARCHITECTURE = "architecture"
    NO_DEVICE = "no_device"


@dataclass(frozen=True)
class Reason:
    """A cause and what can be done about it."""

    kind: ReasonKind
    text: str

    def __str__(self) -> str:
        return self.text


def one_line(error: BaseException) -> str:
    """An error's class and text in one line, whatever its text does."""
    try:
        text = " ".join(str(error).split())
    except KeyboardInterrupt:
        raise
    except BaseException as another:  # noqa: BLE001 (whatever the error's own text raises)
        text = f"its text raises {type(another).__name__}"
    return f"{type(error).__name__}: {text}"
