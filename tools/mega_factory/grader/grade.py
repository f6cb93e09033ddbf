# SPDX-License-Identifier: Apache-2.0
"""Grades a solution of this task: `python grade.py SOLUTION.py`; `-h` lists the options."""

import runpy
import sys
from pathlib import Path

# Python leaves it out if PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).resolve().parent))
# By name, and not by an import: this file lies beside the package only in a bundle.
runpy.run_module("grader", run_name="__main__")
