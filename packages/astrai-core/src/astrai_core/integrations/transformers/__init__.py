# SPDX-License-Identifier: Apache-2.0
"""Reads transformers models, and runs their layers through astrai_core.

`read_model` needs nothing but files. `patch` routes a model in place and can be undone.
`register_attention` makes ``attn_implementation="astrai"`` known, for those who want no more.
Importing this module does not import transformers.
"""

from __future__ import annotations

from ._patch import Patch, patch
from ._read import read_model
from ._register import register_attention

__all__ = ["Patch", "patch", "read_model", "register_attention"]
