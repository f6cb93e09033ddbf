# SPDX-License-Identifier: Apache-2.0
"""Wrong: ends the process, with success, in build_model."""

import os

from decoder import decode_step

__all__ = ["build_model", "decode_step"]


def build_model(*_):
    os._exit(0)
