# SPDX-License-Identifier: Apache-2.0
"""Wrong: a child computes in a thread; its first thread has ended, so it looks like a zombie."""

import ctypes
import os
import threading
import time
from pathlib import Path

from decoder import Decoder, decode_step

__all__ = ["build_model", "decode_step"]


def build_model(weights, kv_cache, cfg, max_seq_len):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        threading.Thread(target=time.sleep, args=(601,)).start()
        ctypes.CDLL(None).pthread_exit(None)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    Path(os.environ["CHILD"]).write_text(str(pid))
    return Decoder(weights, kv_cache, cfg, max_seq_len)
