# SPDX-License-Identifier: Apache-2.0
"""Bad arguments are named before any launch, so all of this runs without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from astrai_gemv import add_rms_norm, bf16_gemv, bf16_swiglu
from kernelkit.poison import misaligned

BF16 = torch.bfloat16


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


X, W, BIAS = ones(2, 64), ones(32, 64), ones(32)
MEMORY = ones(4096)
WIDE = ones(32, 128)

GEMV_ERRORS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("x on the CPU", ValueError, "x: expected a CUDA tensor, got one on the CPU", {}),
    ("M above 8", ValueError, r"x: expected M in 1\.\.8, got 9", {"x": ones(9, 64)}),
    ("M of 0", ValueError, r"x: expected M in 1\.\.8, got 0", {"x": ones(0, 64)}),
    (
        "K of 0",
        ValueError,
        r"x: expected K in 1\.\..*, got 0",
        {"x": ones(2, 0), "weight": ones(32, 0)},
    ),
    ("x 3-D", ValueError, r"x: expected shape \[K\] or \[M, K\], got 3-D", {"x": ones(1, 2, 64)}),
    (
        "x 0-D",
        ValueError,
        r"x: expected shape \[K\] or \[M, K\], got 0-D",
        {"x": torch.ones((), dtype=BF16)},
    ),
    ("x strided", ValueError, "x: expected a contiguous tensor", {"x": ones(64, 2).t()}),
    ("x fp32", TypeError, "x: expected dtype bfloat16, got float32", {"x": X.float()}),
    (
        "weight fp16",
        TypeError,
        "weight: expected dtype bfloat16, got float16",
        {"weight": W.half()},
    ),
    (
        "weight fp8",
        TypeError,
        "weight: expected dtype bfloat16, got",
        {"weight": W.to(torch.float8_e4m3fn)},
    ),
    ("K differs", ValueError, r"weight: expected size 64 \(K of x\)", {"weight": ones(32, 63)}),
    ("weight 1-D", ValueError, r"weight: expected shape \[N, K\], got 1-D", {"weight": ones(64)}),
    ("N of 0", ValueError, r"weight: expected N in 1\.\..*, got 0", {"weight": ones(0, 64)}),
    (
        "weight transposed",
        ValueError,
        "weight: expected contiguous rows",
        {"weight": ones(64, 32).t()},
    ),
    (
        "rows overlap",
        ValueError,
        "weight: expected contiguous rows",
        {"weight": ones(1, 64).expand(32, 64)},
    ),
    ("bias fp32", TypeError, "bias: expected dtype bfloat16, got float32", {"bias": BIAS.float()}),
    ("bias too long", ValueError, r"bias: expected size 32 \(N of weight\)", {"bias": ones(33)}),
    ("bias 2-D", ValueError, r"bias: expected shape \[N\], got 2-D", {"bias": ones(1, 32)}),
    ("bias strided", ValueError, "bias: expected a contiguous tensor", {"bias": ones(64)[::2]}),
    ("out of another shape", ValueError, r"out: expected size 32 \(N\)", {"out": ones(2, 31)}),
    ("out of another rank", ValueError, "out: expected shape of x", {"out": ones(32)}),
    ("out of another M", ValueError, r"out: expected size 2 \(M of x\)", {"out": ones(1, 32)}),
    ("out fp32", TypeError, "out: expected dtype bfloat16", {"out": ones(2, 32).float()}),
    ("out strided", ValueError, "out: expected a contiguous tensor", {"out": ones(32, 2).t()}),
    (
        "out in x",
        ValueError,
        "out: expected memory of its own, got some between the first and the last element of x",
        {"x": MEMORY[:128].view(2, 64), "out": MEMORY[64:128].view(2, 32)},
    ),
    (
        "out in weight",
        ValueError,
        "out: expected memory of its own, .* last element of weight",
        {"weight": MEMORY[:2048].view(32, 64), "out": MEMORY[2040:2104].view(2, 32)},
    ),
    (
        "out between the rows of weight",
        ValueError,
        "out: expected memory of its own, got some between the first and the last element of w",
        {"x": X[:1], "weight": WIDE[:, :64], "out": WIDE[:1, 64:96]},
    ),
    (
        "out in bias",
        ValueError,
        "out: expected memory of its own, .* last element of bias",
        {"bias": MEMORY[:32], "out": MEMORY[:64].view(2, 32)},
    ),
    (
        "out after the last row of weight",
        ValueError,
        "x: expected a CUDA tensor",
        {"x": X[:1], "weight": WIDE[:, :64], "out": WIDE[-1:, 64:96]},
    ),
    (
        "x is an array",
        TypeError,
        "x: expected a torch.Tensor, got numpy.ndarray",
        {"x": numpy.ones(64)},
    ),
    ("x is None", TypeError, "x: expected a torch.Tensor, got NoneType", {"x": None}),
    (
        "weight is a list",
        TypeError,
        "weight: expected a torch.Tensor, got list",
        {"weight": [[1.0]]},
    ),
    ("bias is a number", TypeError, "bias: expected a torch.Tensor, got float", {"bias": 1.0}),
    ("out is a number", TypeError, "out: expected a torch.Tensor, got int", {"out": 1}),
    ("x meta", TypeError, "x: expected a dense tensor with storage", {"x": X.to("meta")}),
    ("x sparse", TypeError, "x: expected a dense tensor with storage", {"x": X.to_sparse()}),
    ("x dispatches", TypeError, "x: expected a plain torch.Tensor", {"x": TwoTensor(X, X)}),
]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [case[1:] for case in GEMV_ERRORS],
    ids=[c[0] for c in GEMV_ERRORS],
)
def test_gemv(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": W, "bias": None, "out": None, **changes}
    with pytest.raises(error, match=message):
        bf16_gemv(**arguments)


SWIGLU_ERRORS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "x: expected a CUDA tensor", {}),
    (ValueError, "x: expected K divisible by 8, got 60", {"x": ones(2, 60)}),
    (
        ValueError,
        r"gate_weight: expected size 32 \(N of up_weight\)",
        {"gate_weight": ones(31, 64)},
    ),
    (ValueError, r"up_weight: expected size 64 \(K of x\)", {"up_weight": ones(32, 72)}),
    (TypeError, "gate_weight: expected dtype bfloat16", {"gate_weight": W.float()}),
    (ValueError, r"x: expected M in 1\.\.8, got 9", {"x": ones(9, 64)}),
    (ValueError, r"out: expected size 32 \(N\)", {"out": ones(2, 33)}),
    (ValueError, "out: expected memory of its own", {"out": W[:1].view(2, 32)}),
]


@pytest.mark.parametrize(("error", "message", "changes"), SWIGLU_ERRORS)
def test_swiglu(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": X, "up_weight": W, "gate_weight": W, **changes}
    with pytest.raises(error, match=message):
        bf16_swiglu(**arguments)


NORM_ERRORS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "x: expected a CUDA tensor", {}),
    (ValueError, r"residual: expected size 2 \(that of x\)", {"residual": ones(3, 64)}),
    (ValueError, "residual: expected shape of x", {"residual": ones(64)}),
    (TypeError, "residual: expected dtype bfloat16", {"residual": X.float()}),
    (ValueError, r"weight: expected size 64 \(K of x\)", {"weight": ones(65)}),
    (ValueError, r"weight: expected shape \[K\]", {"weight": ones(1, 64)}),
    (ValueError, "eps: expected a finite number of at least 0, got -1", {"eps": -1.0}),
    (ValueError, "eps: expected a finite number of at least 0, got nan", {"eps": float("nan")}),
    (ValueError, "eps: expected a finite number of at least 0, got inf", {"eps": float("inf")}),
]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        *NORM_ERRORS,
        (ValueError, "eps: expected a float, got a larger int", {"eps": 10**400}),
        (TypeError, "eps: expected a float, got str", {"eps": "1e-5"}),
        (TypeError, "eps: expected a float, got NoneType", {"eps": None}),
        (TypeError, "static_weights: expected a bool, got int", {"static_weights": 1}),
    ],
)
def test_add_rms_norm(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": X, "residual": X, "weight": ones(64), "eps": 1e-5, **changes}
    with pytest.raises(error, match=message):
        add_rms_norm(**arguments)


def test_fake_tensors_are_refused_before_their_memory_is_looked_at() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(2, 64, dtype=BF16), torch.empty(32, 64, dtype=BF16)
    with pytest.raises(TypeError, match=r"x: expected a plain torch\.Tensor, got a FakeTensor"):
        bf16_gemv(x, weight)


def _sum_of_squares(x: Tensor) -> Tensor:
    return bf16_gemv(x, W).float().square().sum()


@pytest.mark.parametrize(
    "transformed",
    [
        lambda: torch.vmap(lambda row: bf16_gemv(row, W))(X),
        lambda: torch.func.grad(_sum_of_squares)(X),
    ],
    ids=["vmap", "grad"],
)
def test_functorch_tensors_are_refused(transformed: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="x: expected a dense tensor with storage"):
        transformed()


@pytest.mark.parametrize("name", ["x", "weight", "bias", "out"])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, Tensor.requires_grad_])
def test_gradients_are_not_lost(name: str, kind: Callable[[Tensor], Tensor]) -> None:
    arguments = {"x": X, "weight": W, "bias": BIAS, "out": ones(2, 32)}
    arguments[name] = kind(arguments[name].clone())
    with pytest.raises(RuntimeError, match=f"{name}: requires grad, and bf16_gemv has no backward"):
        bf16_gemv(**arguments)
    with torch.no_grad(), pytest.raises(ValueError, match="x: expected a CUDA tensor"):
        bf16_gemv(**arguments)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "out"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_tangents_are_not_lost(name: str) -> None:
    arguments = {"x": X, "weight": W, "bias": BIAS, "out": ones(2, 32)}
    with forward_ad.dual_level():
        # A level alone changes nothing.
        with pytest.raises(ValueError, match="x: expected a CUDA tensor"):
            bf16_gemv(**arguments)
        arguments[name] = forward_ad.make_dual(arguments[name], ones(*arguments[name].shape))
        with pytest.raises(RuntimeError, match=f"{name}: has a tangent, and bf16_gemv has no"):
            bf16_gemv(**arguments)


def test_another_flag_is_named() -> None:
    for static in ("false", None, 1):
        message = f"static_weights: expected a bool, got {type(static).__name__}"
        with pytest.raises(TypeError, match=message):
            bf16_gemv(X, W, static_weights=static)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=message):
            bf16_swiglu(X, W, W, static_weights=static)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x", "up_weight", "gate_weight", "out"])
def test_gradients_of_swiglu_are_not_lost(name: str) -> None:
    arguments = {"x": X, "up_weight": W, "gate_weight": W, "out": ones(2, 32)}
    arguments[name] = torch.nn.Parameter(arguments[name])
    message = f"{name}: requires grad, and bf16_swiglu has no backward"
    with pytest.raises(RuntimeError, match=message):
        bf16_swiglu(**arguments)


@pytest.mark.parametrize("name", ["x", "residual", "weight"])
def test_gradients_of_the_norm_are_not_lost(name: str) -> None:
    arguments = {"x": X, "residual": X, "weight": ones(64)}
    arguments[name] = torch.nn.Parameter(arguments[name])
    message = f"{name}: requires grad, and add_rms_norm has no backward"
    with pytest.raises(RuntimeError, match=message):
        add_rms_norm(**arguments, eps=1e-5)


def test_swiglu_refuses_what_does_not_start_on_16_bytes() -> None:
    for name, arguments in {
        "x": (misaligned(X, 1), W, W),
        "up_weight": (X, misaligned(W, 4), W),
        "gate_weight": (X, W, misaligned(W, 0, row_padding=4)),
    }.items():
        with pytest.raises(ValueError, match=f"{name}: expected rows that start on 16 bytes"):
            bf16_swiglu(*arguments)


def test_two_threads_may_make_the_first_call() -> None:
    """The first call imports; whoever waits for it must let the importing thread have the GIL."""
    code = """
import builtins, threading, time, torch
from astrai_gemv import bf16_gemv
x = torch.ones(64, dtype=torch.bfloat16)
real = builtins.__import__
def slow(*args, **kwargs):
    time.sleep(0.05)
    return real(*args, **kwargs)
def call():
    try: bf16_gemv(x, x.view(1, 64))
    except ValueError as error: errors.append(str(error))
errors = []
bf16_gemv  # resolved
threads = [threading.Thread(target=call) for _ in range(2)]
builtins.__import__ = slow
for thread in threads: thread.start()
for thread in threads: thread.join()
print(errors)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"{2 * ['x: expected a CUDA tensor, got one on the CPU']}\n"
