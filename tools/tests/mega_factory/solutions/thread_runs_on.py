# SPDX-License-Identifier: Apache-2.0
"""Right: a thread that build_model starts computes every step, and runs on for ever."""

import queue
import threading

from decoder import Decoder


def build_model(weights, kv_cache, cfg, max_seq_len):
    decoder = Decoder(weights, kv_cache, cfg, max_seq_len)
    requests, answers = queue.SimpleQueue(), queue.SimpleQueue()

    def serve():
        while True:
            answers.put(decoder.step(*requests.get()))

    threading.Thread(target=serve).start()
    return requests, answers


def decode_step(handle, token_ids, pos):
    requests, answers = handle
    requests.put((token_ids, pos))
    return answers.get()
