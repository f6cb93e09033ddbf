# SPDX-License-Identifier: Apache-2.0
"""Results of the ops in a trace, which refuses what the compiled module does, in the same words.

A trace knows neither addresses nor which devices will serve it; the module checks those when it
runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX_TOKENS = 8
_MAX_ROWS = 2**31 - 65
_MAX_K = 2**27


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, _static_weights: bool) -> Tensor:
    _expect_linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def linear_out(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, _static_weights: bool
) -> None:
    _expect_linear(x, weight, bias)
    _expect_out(out, x, weight)


def swiglu(x: Tensor, up_weight: Tensor, gate_weight: Tensor, _static_weights: bool) -> Tensor:
    _expect_swiglu(x, up_weight, gate_weight)
    return x.new_empty((*x.shape[:-1], up_weight.shape[0]))


def swiglu_out(
    x: Tensor, up_weight: Tensor, gate_weight: Tensor, out: Tensor, _static_weights: bool
) -> None:
    _expect_swiglu(x, up_weight, gate_weight)
    _expect_out(out, x, up_weight)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, _static_weights: bool
) -> tuple[Tensor, Tensor]:
    _expect_tokens(x)
    _expect("residual", residual, x, (x.dim(),), "of x")
    for dim in range(x.dim()):
        _expect_size("residual", residual, dim, x.shape[dim], "that of x")
    _expect_contiguous("residual", residual)
    _expect("weight", weight, x, (1,), "[K]")
    _expect_size("weight", weight, 0, x.shape[-1], "K of x")
    _expect_contiguous("weight", weight)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number of at least 0, got {eps:g}")
    return torch.empty_like(x), torch.empty_like(x)


def _expect_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _expect_tokens(x)
    _expect_weight("weight", weight, x)
    if bias is not None:
        _expect("bias", bias, x, (1,), "[N]")
        _expect_size("bias", bias, 0, weight.shape[0], "N of weight")
        _expect_contiguous("bias", bias)


def _expect_swiglu(x: Tensor, up_weight: Tensor, gate_weight: Tensor) -> None:
    _expect_tokens(x)
    if x.shape[-1] % 8 != 0:
        raise ValueError(f"x: expected K divisible by 8, got {x.shape[-1]}")
    weights = {"up_weight": up_weight, "gate_weight": gate_weight}
    for name, weight in weights.items():
        _expect_weight(name, weight, x)
    _expect_size("gate_weight", gate_weight, 0, up_weight.shape[0], "N of up_weight")
    for name, weight in weights.items():
        if weight.shape[0] > 1 and weight.stride(0) % 8 != 0:
            raise ValueError(
                f"{name}: expected rows that start on 16 bytes, got strides "
                f"{list(weight.stride())} in elements of 2 bytes"
            )


def _expect_tokens(x: Tensor) -> None:
    _expect("x", x, x, (1, 2), "[K] or [M, K]")
    if x.dim() == 2:
        _expect_size_in("x", x, 0, _MAX_TOKENS, "M")
    _expect_size_in("x", x, -1, _MAX_K, "K")
    _expect_contiguous("x", x)


def _expect_weight(name: str, weight: Tensor, x: Tensor) -> None:
    _expect(name, weight, x, (2,), "[N, K]")
    _expect_size_in(name, weight, 0, _MAX_ROWS, "N")
    _expect_size(name, weight, 1, x.shape[-1], "K of x")
    inner = weight.shape[1] == 1 or weight.stride(1) == 1
    outer = weight.shape[0] == 1 or weight.stride(0) >= weight.shape[1]
    if not (inner and outer):
        raise ValueError(
            f"{name}: expected contiguous rows (stride 1 in the last dimension, at least "
            f"{weight.shape[1]} in the one before), got strides {list(weight.stride())}"
        )


def _expect_out(out: Tensor, x: Tensor, weight: Tensor) -> None:
    _expect("out", out, x, (x.dim(),), "of x with N for K")
    if x.dim() == 2:
        _expect_size("out", out, 0, x.shape[0], "M of x")
    _expect_size("out", out, -1, weight.shape[0], "N")
    _expect_contiguous("out", out)


def _expect(name: str, tensor: Tensor, x: Tensor, ranks: tuple[int, ...], layout: str) -> None:
    if tensor.dtype != torch.bfloat16:
        found = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: expected dtype bfloat16, got {found}")
    if tensor.dim() not in ranks:
        shape = list(tensor.shape)
        raise ValueError(f"{name}: expected shape {layout}, got {tensor.dim()}-D {shape}")
    if tensor.device != x.device:
        raise ValueError(f"{name}: expected the device of x ({x.device}), got {tensor.device}")


def _expect_size(name: str, tensor: Tensor, dim: int, size: int, meaning: str) -> None:
    if tensor.shape[dim] != size:
        raise ValueError(
            f"{name}: expected size {size} ({meaning}) in dimension {dim % tensor.dim()}, "
            f"got shape {list(tensor.shape)}"
        )


def _expect_size_in(name: str, tensor: Tensor, dim: int, high: int, meaning: str) -> None:
    if not 1 <= tensor.shape[dim] <= high:
        raise ValueError(
            f"{name}: expected {meaning} in 1..{high}, got {tensor.shape[dim]} "
            f"(shape {list(tensor.shape)})"
        )


def _expect_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got shape {list(tensor.shape)} "
            f"with strides {list(tensor.stride())}"
        )
