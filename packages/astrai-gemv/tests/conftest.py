# SPDX-License-Identifier: Apache-2.0
from kernelkit.fixtures import seeded

__all__ = ["seeded"]
