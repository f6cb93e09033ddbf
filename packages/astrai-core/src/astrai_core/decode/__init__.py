# SPDX-License-Identifier: Apache-2.0
"""Whole-model decode: one token of each sequence through all layers of a Llama, in one call.

`build_model` selects an implementation once, for the life of its handle: by context
(``astrai_core.use(decode=...)``, strict), then ``ASTRAI_DECODE`` = ``torch``, ``composed``,
``megakernel`` or ``auto``, then the measured table, then torch.
"""

from __future__ import annotations

from ._handle import Handle, build_model, decode_step, teardown

__all__ = ["Handle", "build_model", "decode_step", "teardown"]
