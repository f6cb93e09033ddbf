# SPDX-License-Identifier: Apache-2.0
"""Attention of transformers models by `astrai_core.attention`; imports transformers itself."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import astrai_core
from astrai_core.attn import dispatch

from ._register import NAME
from ._traced import is_recorded

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["register"]

_functions: Any = AttentionInterface()  # type: ignore[no-untyped-call, unused-ignore]

# What changes the result and what transformers' sdpa, too, would leave out or refuse.
_UNKNOWN_TO_SDPA = ("s_aux", "softcap")


def register() -> None:
    """Gives transformers the two functions.

    Raises:
        ImportError: a transformers whose masks are asked for in another way.
    """
    # By the positions in the cache, which are on the device.
    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"{transformers.__version__} has masks without q_offset")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """What a query may attend to, bool; None where that is all keys up to its own.

    transformers' mask for sdpa, which lacks such a None for queries that continue a cache: sdpa's
    own causal mask starts at the first key. Nor is there one here for keys that are not filled yet.
    """
    if (
        allow_is_causal_skip
        and isinstance(q_offset, int)  # a static cache has it on the device
        and q_offset + q_length == kv_offset + kv_length
        and (local_size is None or kv_length < local_size)
        and not torch.compiler.is_exporting()
        and _keeps_all(attention_mask, kv_offset, kv_length)
    ):
        return None
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **options,
    )
    return mask


def _keeps_all(padding: Tensor | None, kv_offset: int, kv_length: int) -> bool:
    """Whether a padding mask, ``[batch, tokens]``, hides none of the keys."""
    if padding is None:
        return True
    # Where a forward is recorded the values cannot be read, or are not those of its later runs.
    if is_recorded(padding) or padding.shape[-1] < kv_offset + kv_length:
        return False
    return bool(padding[:, kv_offset : kv_offset + kv_length].all())


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: bhld in, blhd out, no weights."""
    q_len = query.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # Sizes are tensors to torch.jit.trace.
    causal = bool(causal) and attention_mask is None and bool(q_len > 1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    reason = _obstacle(q, k, v, attention_mask, dropout, scaling, options)
    if reason is None:
        # A kernel has no backward; outside of training there is nothing else to tell by.
        fwd: Any = "decode" if q_len == 1 else "prefill"
        fwd = None if torch.is_grad_enabled() else fwd
        y = astrai_core.attention(q, k, v, attn_mask=attention_mask, is_causal=causal, fwd=fwd)
        return y, None

    if not torch.compiler.is_compiling():
        call = (q, k, v, None, 0, attention_mask, causal, None)
        dispatch.note_elsewhere(call, "transformers", reason)
    if causal and key.shape[2] > q_len:
        # sdpa would align the queries to the first key.
        ones = torch.ones(q_len, key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = ones.tril(key.shape[2] - q_len)[None, None]
    y, _ = _functions["sdpa"](
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **options,
    )
    return y, None


def _obstacle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    options: dict[str, Any],
) -> str | None:
    """Why `astrai_core.attention` cannot compute a call, in blhd; None if it can.

    Raises:
        ValueError: nor can transformers' sdpa.
    """
    for name in _UNKNOWN_TO_SDPA:
        if options.get(name) is not None:
            raise ValueError(f"{name}: attn_implementation={NAME!r} has none; use 'eager'")
    packed = options.get("cu_seq_lens_q")
    if packed is not None and mask is None and packed.numel() > 2:
        raise ValueError(
            f"cu_seq_lens_q: attn_implementation={NAME!r} takes no packed sequences without a "
            "mask, as continuous batching has them; use 'sdpa'"
        )
    window = options.get("sliding_window")
    head_dim = q.shape[-1]
    if dropout:
        return f"dropout = {dropout}"
    if scaling is not None and not math.isclose(scaling, head_dim**-0.5, rel_tol=1e-6):
        return f"scaling = {scaling:.6g}, not 1 / sqrt(head_dim)"
    if window is not None and k.shape[1] > window:
        return f"sliding_window = {window}, and there are more keys"
    if k.shape != v.shape or k.shape[-1] != head_dim or q.shape[0] != k.shape[0]:
        return "queries, keys and values differ in head_dim or batch"
    if mask is not None and mask.dtype is not torch.bool:
        return f"attn_mask is {str(mask.dtype).removeprefix('torch.')}, not bool"
    if mask is not None and mask.shape != (q.shape[0], 1, q.shape[1], k.shape[1]):
        return "attn_mask is not [batch, 1, queries, keys]"
    for name in ("position_bias", "output_attentions"):
        if options.get(name) is not None and options[name] is not False:
            return f"{name} is given"
    return None
