# SPDX-License-Identifier: Apache-2.0
"""Wrong: raises what is no Exception, in teardown."""

from decoder import build_model, decode_step

__all__ = ["build_model", "decode_step", "teardown"]


def teardown(handle):
    raise SystemExit(f"no end for {type(handle).__name__}")
