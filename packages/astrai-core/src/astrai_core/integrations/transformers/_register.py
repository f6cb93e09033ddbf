# SPDX-License-Identifier: Apache-2.0
"""Makes ``attn_implementation="astrai"`` known to transformers, which is imported only then."""

from __future__ import annotations

__all__ = ["NAME", "register_attention"]

NAME = "astrai"


def register_attention() -> None:
    """Makes ``attn_implementation="astrai"`` known to transformers; `patch` does it by itself.

    Then ``from_pretrained(..., attn_implementation="astrai")`` or
    ``model.set_attn_implementation("astrai")`` selects it, for every architecture that asks
    transformers' attention interface. Without gradients a call is ``fwd="decode"`` for one query a
    sequence and ``"prefill"`` for more; with gradients it is a training call.

    Dropout, another scale than ``1 / sqrt(head_dim)``, a sliding window shorter than the keys, and
    masks that are not bool or differ between heads are computed by transformers' own ``sdpa``;
    `explain` shows the reason. Attention sinks and soft caps are an error: sdpa has neither.

    Raises:
        RuntimeError: no transformers, or one that asks for masks in another way, as older ones do.
    """
    try:
        from . import _attention

        _attention.register()
    except ImportError as error:
        raise RuntimeError(f"a newer transformers is needed: {error}") from error
