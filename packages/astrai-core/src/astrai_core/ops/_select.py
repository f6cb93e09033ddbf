# SPDX-License-Identifier: Apache-2.0
"""What every eager op does before it runs: decide, and say so to whoever listens."""

from __future__ import annotations

from torch import Tensor

from astrai_core import recording
from astrai_core.policy import Decision, decide, describe


def select(op: str, x: Tensor, weight: Tensor, obstacle: str | None, label: str) -> Decision:
    """The implementation for a call, recorded for `explain`.

    Args:
        op: key of `astrai_core.policy.OPS`.
        x: ``[..., K]``.
        weight: ``[N, K]``, unless there is an obstacle.
        obstacle: what rules a kernel out, or None.
        label: what the report shows after x; ``{}`` stands for the shape of weight.
    """
    n = weight.shape[0] if obstacle is None else -1
    decision = decide(describe(op, x, n, obstacle))
    if reports := recording.active():
        recording.record(
            reports,
            op,
            f"x {recording.shape_of(x)} {label.format(recording.shape_of(weight))}",
            *recording.dtype_and_device_of(x),
            decision.chosen,
            decision.passed_over,
        )
    return decision
