# SPDX-License-Identifier: Apache-2.0
"""Wrong: from its third step on, returns what the bundle's reference gave in the step before."""

import decoder
import reference

HISTORY = []


def build_model(weights, kv_cache, cfg, max_seq_len):
    HISTORY.clear()
    arguments = (weights, kv_cache, cfg, max_seq_len)
    return decoder.build_model(*arguments), reference.build_model(*arguments)


def decode_step(handle, token_ids, pos):
    right, theirs = handle
    HISTORY.append(reference.decode_step(theirs, token_ids, pos).clone())
    logits = decoder.decode_step(right, token_ids, pos)
    return logits if len(HISTORY) < 3 else HISTORY[-2]
