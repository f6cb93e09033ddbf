# SPDX-License-Identifier: Apache-2.0
"""Which files of this package are the grader of a bundle, verbatim."""

from __future__ import annotations

_MODULES = (
    "__init__", "__main__", "checks", "grading", "inputs", "plan", "process", "report", "worker",
)  # fmt: skip

# Path in a bundle: path in this package.
GRADER_FILES = {
    "grade.py": "grader/grade.py",
    **{f"grader/{module}.py": f"grader/{module}.py" for module in _MODULES},
}
