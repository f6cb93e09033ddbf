# SPDX-License-Identifier: Apache-2.0
"""Version of a family: the one in its pyproject.toml, with an optional local label.

A wheel for one architecture carries a label (`0.1.0+sm90a`), named by `ASTRAI_WHEEL_LABEL`. The
wheel meant for a package index has none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The `version` field, from the `version` setting and `ASTRAI_WHEEL_LABEL`."""
    del project
    label = os.environ.get("ASTRAI_WHEEL_LABEL", "")
    if label and not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", label):
        raise ValueError(
            f"ASTRAI_WHEEL_LABEL: expected letters, digits and dots such as 'sm90a', got {label!r}"
        )
    version = settings["version"]
    return {"version": f"{version}+{label}" if label else version}
