# SPDX-License-Identifier: Apache-2.0
"""Wrong: another process, which outlives build_model, would do the work."""

import subprocess
import sys

from decoder import Decoder, decode_step

__all__ = ["build_model", "decode_step"]

# The one in between has ended, so that this process is no longer the parent of the other.
CHILD = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}])"


def build_model(weights, kv_cache, cfg, max_seq_len):
    subprocess.run([sys.executable, "-c", PARENT], check=True, start_new_session=True)
    return Decoder(weights, kv_cache, cfg, max_seq_len)
