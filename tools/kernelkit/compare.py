# SPDX-License-Identifier: Apache-2.0
"""Comparison with a float64 reference, bounded by the error of torch's own low-precision path."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def assert_close_to_reference(
    out: Tensor,
    ref64: Tensor,
    baseline: Tensor,
    *,
    factor: float = 2.0,
    floor: float | None = None,
) -> float:
    """Fails unless `out` is nearly as close to the reference as `baseline` is.

    NaNs and infinities must be where the reference has them. Of the rest, neither the largest nor
    the root mean square error may exceed ``factor`` times the baseline's, plus ``floor``.

    Args:
        out: the result under test.
        ref64: the reference, float64, of the same shape.
        baseline: what torch computes from the same inputs in the precision of `out`.
        factor: how much worse than the baseline is still right.
        floor: absolute error that is right in any case. By default half a unit in the last place of
            `out` at the reference's largest magnitude: what rounding alone costs.

    Returns:
        The largest absolute error of `out`.
    """
    if ref64.dtype != torch.float64:
        raise TypeError(f"ref64: expected float64, got {ref64.dtype}")
    for name, tensor in (("out", out), ("baseline", baseline)):
        if tensor.shape != ref64.shape:
            raise AssertionError(
                f"{name}: shape {tuple(tensor.shape)}, the reference has {tuple(ref64.shape)}"
            )
    ref64 = ref64.detach()
    _assert_same_specials(out, ref64)
    finite = ref64.to(out.dtype).isfinite()
    error = _error(out, ref64, finite)
    allowed = _error(baseline, ref64, finite & baseline.isfinite())
    if floor is None:
        largest = torch.where(finite, ref64, 0).abs().max().item() if ref64.numel() else 0.0
        floor = half_ulp(largest, out.dtype)

    worst, rms = error.max().item() if error.numel() else 0.0, _rms(error)
    limit = factor * (allowed.max().item() if allowed.numel() else 0.0) + floor
    if worst > limit:
        index = _index(int(error.argmax()), ref64)
        count = int((error > limit).sum())
        raise AssertionError(
            f"max abs error {worst:.4g} at {index} exceeds {limit:.4g} "
            f"= {factor:g} x {allowed.max().item():.4g} (baseline) + {floor:.4g}; "
            f"there out is {out[index].item():.6g}, the reference {ref64[index].item():.6g}, "
            f"the baseline {baseline[index].item():.6g}; "
            f"{count} of {error.numel()} elements exceed it"
        )
    scale = _rms(torch.where(finite, ref64, 0))
    limit = factor * _rms(allowed) + floor
    if rms > limit:
        raise AssertionError(
            f"relative difference of the whole tensor {_ratio(rms, scale):.4g} exceeds "
            f"{_ratio(limit, scale):.4g} = {factor:g} x {_ratio(_rms(allowed), scale):.4g} "
            f"(baseline) + {_ratio(floor, scale):.4g}: an error that is spread, not an outlier"
        )
    return worst


def half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Half the distance between `magnitude` and its neighbour in `dtype`."""
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(magnitude, info.smallest_normal)))
    return info.eps / 2 * 2.0**exponent


def _assert_same_specials(out: Tensor, ref64: Tensor) -> None:
    # A finite reference beyond the range of the output's dtype rounds to infinity there.
    expected = ref64.to(out.dtype)
    for name, found, wanted in (
        ("NaN", out.isnan(), expected.isnan()),
        ("+inf", out == math.inf, expected == math.inf),
        ("-inf", out == -math.inf, expected == -math.inf),
    ):
        wrong = found != wanted
        if wrong.any():
            index = _index(int(wrong.int().argmax()), ref64)
            raise AssertionError(
                f"{name} differs in {int(wrong.sum())} of {wrong.numel()} elements, first at "
                f"{index}: out is {out[index].item():.6g}, the reference {ref64[index].item():.6g}"
            )


def _error(value: Tensor, ref64: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, value.detach().double() - ref64, 0).abs()


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def _ratio(value: float, scale: float) -> float:
    return value / scale if scale else math.inf


def _index(flat: int, like: Tensor) -> tuple[int, ...]:
    index = []
    for size in reversed(like.shape):
        flat, coordinate = divmod(flat, size)
        index.append(coordinate)
    return tuple(reversed(index))
