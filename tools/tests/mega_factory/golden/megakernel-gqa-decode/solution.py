"""A solution of megakernel-gqa-decode; see TASK.md."""


def build_model(weights, kv_cache, cfg, max_seq_len):
    """Prepares decoding; untimed. Returns a handle of any type.

    weights   : dict from the reference's make_weights (see /app/reference.py)
    kv_cache  : list of (k, v), one pair per layer
    cfg       : dict with the model's sizes
    max_seq_len : capacity of the cache per sequence, in tokens
    """
    raise NotImplementedError


def decode_step(handle, token_ids, pos):
    """Returns logits (1, 128256), bf16 or fp32, of one token per sequence; timed.

    token_ids : (1,), int64
    pos       : int, the position that this step writes
    """
    raise NotImplementedError


def teardown(handle):
    """Ends what `build_model` started, such as a persistent kernel; may be left out."""
