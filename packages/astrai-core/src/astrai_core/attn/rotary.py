# SPDX-License-Identifier: Apache-2.0
"""apply_rotary_emb: turns pairs of each head by the angles of its position."""

from __future__ import annotations

import torch
from torch import Tensor

from astrai_core import recording
from astrai_core.policy import observer

from .backends import kernel
from .step import FAMILY

__all__ = ["apply_rotary_emb"]

MAX_HEAD_DIM = 512


def apply_rotary_emb(
    x: Tensor, rotary_emb: tuple[Tensor, Tensor], *, interleaved: bool = True
) -> Tensor:
    """Turns the pairs ``(a, b)`` of x into ``(a cos - b sin, b cos + a sin)``.

    The attention family's kernel serves bf16 on a GPU with gradients disabled; torch every other
    call, in fp32 (fp64 for fp64) and rounded once. `explain` says which and why.

    Args:
        x: ``[batch, length, heads, head_dim]``.
        rotary_emb: cos and sin, ``[length, head_dim / 2]`` or ``[batch, length, head_dim / 2]``,
            fp32; a batch of 1 holds for all.
        interleaved: pairs are the elements ``2i, 2i + 1``; else ``i, i + head_dim / 2``.

    Returns:
        Of x's shape and dtype.

    Raises:
        ValueError: operands that do not fit.
    """
    cos, sin = rotary_emb
    _check(x, cos, sin)
    if torch.compiler.is_compiling():
        return by_torch(x, cos, sin, interleaved)
    why = _obstacle(x, cos, sin)
    run = None
    if why is None:
        run, why = kernel("rotary_emb", x.get_device())
    if reports := recording.active():
        over = {FAMILY: str(why)} if run is None else {"torch": "the kernel can serve the call"}
        recording.record(
            reports,
            "rotary_emb",
            f"x {recording.shape_of(x)} cos, sin {recording.shape_of(cos)}",
            str(x.dtype).removeprefix("torch."),
            str(x.device),
            "torch" if run is None else FAMILY,
            over,
        )
    if run is None:
        return by_torch(x, cos, sin, interleaved)
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    y: Tensor = run(x, cos, sin, interleaved=interleaved)
    return y


def by_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`apply_rotary_emb` by torch, for operands that fit."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # [length, pairs] and [batch, length, pairs] alike, beside the heads.
    cos, sin = (angle.to(wide).unsqueeze(-2) for angle in (cos, sin))
    if interleaved:
        pairs = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).to(x.dtype)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _obstacle(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """What rules the kernel out, or None."""
    if any(type(tensor) is not Tensor for tensor in (x, cos, sin)):
        return "an operand is no plain tensor"
    if x.dtype != torch.bfloat16:
        return "x is not bfloat16"
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return "cos or sin is not float32"
    if torch.is_grad_enabled():
        return "gradients are enabled, and the kernel has no backward"
    if x.get_device() < 0 or any(t.get_device() != x.get_device() for t in (cos, sin)):
        return "the operands are not on one CUDA device"
    if x.numel() == 0:
        return "there is nothing to compute"
    if x.shape[-1] % 16 or x.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim = {x.shape[-1]}: the kernel takes multiples of 16 up to {MAX_HEAD_DIM}"
    if x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1]) or x.data_ptr() % 16:
        return "the rows of x are not contiguous, or do not start on 16 bytes"
    if not (cos.is_contiguous() and sin.is_contiguous()) or (cos.data_ptr() | sin.data_ptr()) % 16:
        return "cos or sin is not contiguous, or does not start on 16 bytes"
    return observer()


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(
            f"x: expected [batch, length, heads, head_dim] with an even head_dim, got {[*x.shape]}"
        )
    batch, length, _, head_dim = x.shape
    pairs = (length, head_dim // 2)
    if tuple(cos.shape) not in (pairs, (1, *pairs), (batch, *pairs)):
        raise ValueError(f"cos: expected {[*pairs]} or {[batch, *pairs]}, got {[*cos.shape]}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected cos's shape {[*cos.shape]}, got {[*sin.shape]}")
