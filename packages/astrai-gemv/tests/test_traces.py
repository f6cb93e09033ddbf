# SPDX-License-Identifier: Apache-2.0
"""What a trace refuses: the operands of the eager errors, transforms and forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_errors import GEMV_ERRORS, NORM_ERRORS, SWIGLU_ERRORS, W, X, ones
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import astrai_gemv
import astrai_gemv._library  # registers the operators
from kernelkit.transforms import TRANSFORMS, forward_mode

# Those are torch's own.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

# No trace knows addresses, nor where it will run; an operator's schema knows what a tensor is.
UNKNOWN = ("CUDA tensor", "memory of its own", "torch.Tensor", "a dense tensor")
NORM: dict[str, Any] = {"x": X, "residual": X, "weight": ones(64), "eps": 1e-5}
CASES = [
    *(({"x": X, "weight": W, "bias": None}, "bf16_gemv", *case[1:]) for case in GEMV_ERRORS),
    *(({"x": X, "up_weight": W, "gate_weight": W}, "bf16_swiglu", *c) for c in SWIGLU_ERRORS),
    *((NORM, "add_rms_norm", *case) for case in NORM_ERRORS),
    (
        {"x": X, "up_weight": ones(32, 68)[:, :64], "gate_weight": W},
        "bf16_swiglu",
        ValueError,
        "up_weight: expected rows that start on 16 bytes",
        {},
    ),
]


@pytest.mark.parametrize(
    ("arguments", "op", "error", "message", "changes"),
    [case for case in CASES if not any(text in case[3] for text in UNKNOWN)],
)
def test_fakes_refuse_what_eager_calls_do(
    arguments: dict[str, Any],
    op: str,
    error: type[Exception],
    message: str,
    changes: dict[str, Any],
) -> None:
    mode = FakeTensorMode()
    operands = {
        name: mode.from_tensor(value) if isinstance(value, Tensor) else value
        for name, value in {**arguments, **changes}.items()
    }
    name = f"{op}_out" if "out" in operands else op
    with mode, pytest.raises(error, match=message):
        getattr(torch.ops.astrai_gemv, name)(**operands, static_weights=False)


def test_fakes_take_one_device() -> None:
    mode = FakeTensorMode()
    x, weight = mode.from_tensor(X), mode.from_tensor(W).to("meta")
    with mode, pytest.raises(ValueError, match="weight: expected the device of x"):
        torch.ops.astrai_gemv.bf16_gemv(x, weight, None, False)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16_gemv": lambda x: astrai_gemv.bf16_gemv(x, W),
    "bf16_swiglu": lambda x: astrai_gemv.bf16_swiglu(x, W, W),
    "add_rms_norm": lambda x: astrai_gemv.add_rms_norm(x, x, ones(64), 1e-5)[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_traces_refuse_transforms(
    op: Callable[[Tensor], Tensor], transform: Callable[..., object]
) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="has no derivative and no batching rule"):
        torch.compile(lambda: transform(op, X), backend="eager")()


def test_operators_refuse_forward_mode() -> None:
    with pytest.raises(RuntimeError, match="has no derivative and no batching rule"):
        forward_mode(lambda x: torch.ops.astrai_gemv.bf16_gemv(x, W, None, False), X)
