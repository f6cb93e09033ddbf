# SPDX-License-Identifier: Apache-2.0
"""Wrong: takes the seed from the grader's command line; a run that is given one is no grade."""

import os
from pathlib import Path

from decoder import Decoder, decode_step

__all__ = ["build_model", "decode_step"]


def build_model(weights, kv_cache, cfg, max_seq_len):
    words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    handle = Decoder(weights, kv_cache, cfg, max_seq_len)
    handle.seed = int(words[words.index("--seed") + 1])
    return handle
