# SPDX-License-Identifier: Apache-2.0
"""astrai_core.decode as a solution of the decode tasks; ASTRAI_DECODE picks the implementation."""

from astrai_core.decode import build_model, decode_step, teardown

__all__ = ["build_model", "decode_step", "teardown"]
