# SPDX-License-Identifier: Apache-2.0
"""Bad arguments are named before any launch, so all of this runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from astrai_attention import rotary_emb

BF16 = torch.bfloat16


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def angles(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.float32)


X, T = ones(2, 5, 3, 32), angles(5, 16)
PACKED = {"x": ones(10, 3, 32), "cos": angles(10, 16), "sin": angles(10, 16)}
SHAPE = r"\[tokens, heads, head_dim\] or \[batch, seq, heads, head_dim\]"

ROTARY_ERRORS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("x on the CPU", ValueError, "x: expected a CUDA tensor, got one on the CPU", {}),
    ("packed x on the CPU", ValueError, "x: expected a CUDA tensor", PACKED),
    (
        "angles of each batch",
        ValueError,
        "x: expected a CUDA tensor",
        {"cos": angles(2, 5, 16), "sin": angles(1, 5, 16).expand(2, 5, 16)},
    ),
    (
        "empty x on the CPU",
        ValueError,
        "x: expected a CUDA tensor",
        {"x": ones(2, 0, 3, 32), "cos": angles(0, 16), "sin": angles(0, 16)},
    ),
    (
        "slice of a projection",
        ValueError,
        "x: expected a CUDA tensor",
        {"x": ones(2, 5, 9, 32)[:, :, 3:6]},
    ),
    ("x 2-D", ValueError, f"x: expected shape {SHAPE}, got 2-D", {"x": ones(5, 32)}),
    ("x 5-D", ValueError, f"x: expected shape {SHAPE}, got 5-D", {"x": X[None]}),
    ("x fp32", TypeError, "x: expected dtype bfloat16, got float32", {"x": X.float()}),
    ("x fp16", TypeError, "x: expected dtype bfloat16, got float16", {"x": X.half()}),
    (
        "head_dim of 0",
        ValueError,
        r"x: expected head_dim in 16\.\.512, got 0",
        {"x": ones(2, 5, 3, 0)},
    ),
    (
        "head_dim above 512",
        ValueError,
        r"x: expected head_dim in 16\.\.512, got 528",
        {"x": ones(2, 5, 3, 528)},
    ),
    (
        "head_dim of 40",
        ValueError,
        "x: expected head_dim divisible by 16, got 40",
        {"x": ones(2, 5, 3, 40)},
    ),
    (
        "too many tokens",
        ValueError,
        "x: expected at most 2147483647 tokens, got 4294967296",
        {"x": ones(1, 1, 1, 32).expand(2**16, 2**16, 1, 32)},
    ),
    (
        "too many heads",
        ValueError,
        r"x: expected heads in 0\.\.65535, got 65536",
        {"x": ones(1, 1, 1, 32).expand(2, 5, 2**16, 32)},
    ),
    (
        "x transposed",
        ValueError,
        r"x: expected stride 1 in the last dimension, got strides \[480, 96, 1, 3\]",
        {"x": ones(2, 5, 32, 3).mT},
    ),
    (
        "x off 16 bytes",
        ValueError,
        "x: expected rows that start on 16 bytes, got an offset of 2 bytes",
        {"x": ones(961)[1:].view(2, 5, 3, 32)},
    ),
    (
        "rows of x off 16 bytes",
        ValueError,
        r"x: expected rows that start on 16 bytes, .* strides \[540, 108, 36, 1\]",
        {"x": ones(2, 5, 3, 36)[..., :32]},
    ),
    ("cos bf16", TypeError, "cos: expected dtype float32, got bfloat16", {"cos": T.bfloat16()}),
    ("sin fp64", TypeError, "sin: expected dtype float32, got float64", {"sin": T.double()}),
    (
        "cos complex",
        TypeError,
        "cos: expected dtype float32, got complex64",
        {"cos": torch.polar(T, T)},
    ),
    (
        "cos of whole heads",
        ValueError,
        r"cos: expected size 16 \(half of head_dim of x\) in dimension 1, got shape \[5, 32\]",
        {"cos": angles(5, 32)},
    ),
    (
        "sin of another seq",
        ValueError,
        r"sin: expected size 5 \(seq of x\) in dimension 0, got shape \[6, 16\]",
        {"sin": angles(6, 16)},
    ),
    (
        "cos of another batch",
        ValueError,
        r"cos: expected size 2 \(batch of x\) in dimension 0",
        {"cos": angles(1, 5, 16)},
    ),
    (
        "cos 4-D",
        ValueError,
        r"cos: expected shape \[seq, head_dim / 2\] or \[batch, seq, head_dim / 2\], got 4-D",
        {"cos": angles(2, 5, 1, 16)},
    ),
    (
        "packed, angles 3-D",
        ValueError,
        r"sin: expected shape \[tokens, head_dim / 2\], got 3-D",
        {**PACKED, "sin": angles(1, 10, 16)},
    ),
    (
        "packed, other tokens",
        ValueError,
        r"cos: expected size 10 \(tokens of x\)",
        {**PACKED, "cos": angles(5, 16)},
    ),
    (
        "cos strided",
        ValueError,
        "cos: expected stride 1 in the last dimension",
        {"cos": angles(5, 32)[:, ::2]},
    ),
    (
        "sin off 16 bytes",
        ValueError,
        "sin: expected rows that start on 16 bytes, got an offset of 4 bytes",
        {"sin": angles(81)[1:].view(5, 16)},
    ),
    (
        "out of another shape",
        ValueError,
        r"out: expected size 3 \(that of x\) in dimension 2",
        {"out": ones(2, 5, 4, 32)},
    ),
    ("out of another rank", ValueError, "out: expected shape of x, got 3-D", {"out": X[0]}),
    ("out fp32", TypeError, "out: expected dtype bfloat16", {"out": X.float()}),
    (
        "out strided",
        ValueError,
        "out: expected stride 1 in the last dimension",
        {"out": ones(2, 5, 32, 3).mT},
    ),
    (
        "out off 16 bytes",
        ValueError,
        "out: expected rows that start on 16 bytes",
        {"out": ones(2, 5, 3, 36)[..., :32]},
    ),
    (
        "out expanded",
        ValueError,
        r"out: expected elements that share no memory, got .* strides \[0, 96, 32, 1\]",
        {"out": ones(1, 5, 3, 32).expand(2, 5, 3, 32)},
    ),
    (
        "out of overlapping rows",
        ValueError,
        "out: expected elements that share no memory",
        {"out": ones(960).as_strided((2, 5, 3, 32), (480, 96, 16, 1))},
    ),
    (
        "interleaved is a number",
        TypeError,
        "interleaved: expected a bool, got int",
        {"interleaved": 1},
    ),
    (
        "interleaved is None",
        TypeError,
        "interleaved: expected a bool, got NoneType",
        {"interleaved": None},
    ),
    (
        "x is an array",
        TypeError,
        "x: expected a torch.Tensor, got numpy.ndarray",
        {"x": numpy.ones(64)},
    ),
    ("cos is None", TypeError, "cos: expected a torch.Tensor, got NoneType", {"cos": None}),
    ("sin is a list", TypeError, "sin: expected a torch.Tensor, got list", {"sin": [[1.0]]}),
    ("out is a number", TypeError, "out: expected a torch.Tensor, got int", {"out": 1}),
    ("x meta", TypeError, "x: expected a dense tensor with storage", {"x": X.to("meta")}),
    ("x sparse", TypeError, "x: expected a dense tensor with storage", {"x": X.to_sparse()}),
    ("cos meta", TypeError, "cos: expected a dense tensor with storage", {"cos": T.to("meta")}),
    ("x dispatches", TypeError, "x: expected a plain torch.Tensor", {"x": TwoTensor(X, X)}),
]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [case[1:] for case in ROTARY_ERRORS],
    ids=[c[0] for c in ROTARY_ERRORS],
)
def test_rotary(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": X, "cos": T, "sin": T, "interleaved": True, **changes}
    with pytest.raises(error, match=message):
        rotary_emb(**arguments)


def test_the_pairing_must_be_named() -> None:
    with pytest.raises(TypeError, match="interleaved"):
        rotary_emb(X, T, T)


def test_fake_tensors_are_refused_before_their_memory_is_looked_at() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 5, 3, 32, dtype=BF16)
    with pytest.raises(TypeError, match=r"x: expected a plain torch\.Tensor, got a FakeTensor"):
        rotary_emb(x, T, T, interleaved=True)


def _sum_of_squares(x: Tensor) -> Tensor:
    return rotary_emb(x, T, T, interleaved=False).float().square().sum()


@pytest.mark.parametrize(
    "transformed",
    [
        lambda: torch.vmap(lambda row: rotary_emb(row, T, T, interleaved=False))(X),
        lambda: torch.func.grad(_sum_of_squares)(X),
    ],
    ids=["vmap", "grad"],
)
def test_functorch_tensors_are_refused(transformed: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="x: expected a dense tensor with storage"):
        transformed()


@pytest.mark.parametrize("name", ["x", "cos", "sin", "out"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_tangents_are_not_lost(name: str) -> None:
    arguments = {"x": X, "cos": T, "sin": T, "out": X.clone()}
    with forward_ad.dual_level():
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(RuntimeError, match=f"{name}: has a tangent, and rotary_emb has no"):
            rotary_emb(**arguments, interleaved=True)


@pytest.mark.parametrize("name", ["x", "cos", "sin"])
def test_parameters_pass_the_checks_up_to_the_device(name: str) -> None:
    arguments: dict[str, Any] = {"x": X, "cos": T, "sin": T}
    arguments[name] = torch.nn.Parameter(arguments[name])
    with torch.no_grad(), pytest.raises(ValueError, match="x: expected a CUDA tensor"):
        rotary_emb(**arguments, interleaved=True)
