# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of attn_decode are named before any launch, so this runs without a GPU.

Those of attn_paged_decode are in test_paged_errors.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from astrai_attention import attn_decode

BF16 = torch.bfloat16


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def kv(*shape: int) -> dict[str, Tensor]:
    return {"k": ones(*shape), "v": ones(*shape)}


Q, K, V = ones(2, 1, 6, 32), ones(2, 5, 3, 32), ones(2, 5, 3, 32)
MASK = ones(2, 5, dtype=torch.bool)
OUT = ones(2, 1, 6, 32)
DEVICE = "q: expected a CUDA tensor, got one on the CPU"
HEAD_DIM = "q: expected head_dim 32, 64, 128 or 256, got "

Case = tuple[str, type[Exception], str, dict[str, Any]]

# Right but for the device.
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("causal", {"is_causal": True}),
    ("everything", {"mask": MASK, "scale": 0.5, "return_lse": True, "out": OUT}),
    ("scale a whole number", {"scale": 1}),
    ("mask 3-D", {"mask": MASK[:, None]}),
    ("mask 4-D", {"mask": MASK[:, None, None]}),
    ("mask expanded", {"mask": MASK[:1].expand(2, 5)}),
    ("mask of every second key", {"mask": ones(2, 10, dtype=torch.bool)[:, ::2]}),
    ("no tokens", kv(2, 0, 3, 32)),
    ("no sequences", {"q": ones(0, 1, 6, 32), **kv(0, 5, 3, 32)}),
    ("one KV head", kv(2, 5, 1, 32)),
    ("q of a fused projection", {"q": ones(2, 1, 12, 32)[:, :, :6]}),
    (
        "k and v of a fused projection",
        {"k": ones(2, 5, 12, 32)[:, :, 6:9], "v": ones(2, 5, 12, 32)[:, :, 9:]},
    ),
    (
        "k and v with heads before tokens",
        {"k": ones(2, 3, 5, 32).transpose(1, 2), "v": ones(2, 3, 5, 32).transpose(1, 2)},
    ),
    ("k and v of one sequence", {"k": K[:1].expand(2, 5, 3, 32), "v": V[:1].expand(2, 5, 3, 32)}),
    ("k and v the same", {"k": K, "v": K}),
    (
        "strides of dimensions of size 1",
        {"q": ones(1, 1, 6, 32), "k": K[:1], "v": ones(7, 5, 3, 32)[::7]},
    ),
    ("out strided", {"out": ones(2, 1, 12, 32)[:, :, 6:]}),
]


@pytest.mark.parametrize("changes", [c[1] for c in GOOD], ids=[c[0] for c in GOOD])
def test_the_device_is_checked_last(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=DEVICE):
        attn_decode(**{"q": Q, "k": K, "v": V, **changes})


SHAPES: list[Case] = [
    ("q fp32", TypeError, "q: expected dtype bfloat16, got float32", {"q": Q.float()}),
    ("k fp16", TypeError, "k: expected dtype bfloat16, got float16", {"k": K.half()}),
    ("v fp32", TypeError, "v: expected dtype bfloat16, got float32", {"v": V.float()}),
    (
        "q 3-D",
        ValueError,
        r"q: expected shape \[batch, 1, q_heads, head_dim\], got 3-D \[2, 6, 32\]",
        {"q": Q[:, 0]},
    ),
    (
        "k 3-D",
        ValueError,
        r"k: expected shape \[batch, kv_len, kv_heads, head_dim\], got 3-D",
        {"k": K[0]},
    ),
    (
        "v 5-D",
        ValueError,
        r"v: expected shape \[batch, kv_len, kv_heads, head_dim\], got 5-D",
        {"v": V[None]},
    ),
    (
        "two query tokens",
        ValueError,
        r"q: expected size 1 \(one token of each sequence\) in dimension 1",
        {"q": ones(2, 2, 6, 32)},
    ),
    (
        "no query heads",
        ValueError,
        r"q: expected q_heads in 1\.\.65535, got 0",
        {"q": ones(2, 1, 0, 32)},
    ),
    (
        "too many query heads",
        ValueError,
        r"q: expected q_heads in 1\.\.65535, got 65536",
        {"q": ones(2, 1, 1, 32).expand(2, 1, 2**16, 32)},
    ),
    (
        "too many sequences",
        ValueError,
        r"q: expected batch in 0\.\.2147483647, got 2147483648",
        {"q": ones(1, 1, 6, 32).expand(2**31, 1, 6, 32)},
    ),
    *(
        (f"head_dim of {d}", ValueError, f"{HEAD_DIM}{d}", {"q": ones(2, 1, 6, d)})
        for d in (0, 16, 48, 96, 512)
    ),
    (
        "k of another head_dim",
        ValueError,
        r"k: expected size 32 \(head_dim of q\) in dimension 3, got shape \[2, 5, 3, 64\]",
        kv(2, 5, 3, 64),
    ),
    (
        "v of another head_dim",
        ValueError,
        r"v: expected size 32 \(that of k\) in dimension 3",
        {"v": ones(2, 5, 3, 64)},
    ),
    (
        "no KV heads",
        ValueError,
        r"k: expected kv_heads in 1\.\.65535, got 0",
        kv(2, 5, 0, 32),
    ),
    (
        "KV heads that do not divide",
        ValueError,
        "k: expected kv_heads that divide the 6 heads of q, got 4",
        kv(2, 5, 4, 32),
    ),
    (
        "more KV heads than query heads",
        ValueError,
        "k: expected kv_heads that divide the 6 heads of q, got 12",
        kv(2, 5, 12, 32),
    ),
    ("k of another batch", ValueError, r"k: expected size 2 \(batch of q\)", kv(1, 5, 3, 32)),
    (
        "too many tokens",
        ValueError,
        r"k: expected kv_len in 0\.\.1073741824, got 1073741825",
        {"k": ones(2, 1, 3, 32).expand(2, 2**30 + 1, 3, 32)},
    ),
    *(
        (f"v {shape}", ValueError, rf"v: expected size {size} \(that of k\)", {"v": ones(*shape)})
        for size, shape in ((2, (3, 5, 3, 32)), (5, (2, 6, 3, 32)), (3, (2, 5, 6, 32)))
    ),
]

LAYOUTS: list[Case] = [
    (
        "strides of v unlike k",
        ValueError,
        r"v: expected the strides of k, \[480, 96, 32, 1\], got \[480, 32, 160, 1\]",
        {"v": ones(2, 3, 5, 32).transpose(1, 2)},
    ),
    (
        "v a slice and k not",
        ValueError,
        "v: expected the strides of k",
        {"v": ones(2, 5, 6, 32)[:, :, 3:]},
    ),
    *(
        (
            f"{name} transposed",
            ValueError,
            f"{name}: expected stride 1 in the last dimension",
            {name: x.mT.contiguous().mT},
        )
        for name, x in (("q", Q), ("k", K), ("v", V))
    ),
    (
        "q off 16 bytes",
        ValueError,
        "q: expected rows that start on 16 bytes, got an offset of 2 bytes",
        {"q": ones(385)[1:].view(2, 1, 6, 32)},
    ),
    (
        "k off 16 bytes",
        ValueError,
        "k: expected rows that start on 16 bytes, got an offset of 8 bytes",
        {"k": ones(964)[4:].view(2, 5, 3, 32)},
    ),
    (
        "rows of v off 16 bytes",
        ValueError,
        r"v: expected rows that start on 16 bytes, .* strides \[540, 108, 36, 1\]",
        {"v": ones(2, 5, 3, 36)[..., :32]},
    ),
]

BOOL = {"dtype": torch.bool}
KEYS = r"\[batch, kv_len\], \[batch, 1, kv_len\] or \[batch, 1, 1, kv_len\]"
MASKS: list[Case] = [
    ("mask fp32", TypeError, "mask: expected dtype bool, got float32", {"mask": MASK.float()}),
    ("mask bf16", TypeError, "mask: expected dtype bool, got bfloat16", {"mask": MASK.to(BF16)}),
    ("mask int8", TypeError, "mask: expected dtype bool, got int8", {"mask": MASK.to(torch.int8)}),
    ("mask 1-D", ValueError, f"mask: expected shape {KEYS}, got 1-D", {"mask": MASK[0]}),
    (
        "mask 5-D",
        ValueError,
        f"mask: expected shape {KEYS}, got 5-D",
        {"mask": MASK[:, None, None, None]},
    ),
    (
        "mask of another batch",
        ValueError,
        r"mask: expected size 2 \(batch of q\) in dimension 0, got shape \[1, 5\]",
        {"mask": MASK[:1]},
    ),
    (
        "mask of another length",
        ValueError,
        r"mask: expected size 5 \(kv_len of k\) in dimension 1, got shape \[2, 6\]",
        {"mask": ones(2, 6, **BOOL)},
    ),
    (
        "mask 3-D of another length",
        ValueError,
        r"mask: expected size 5 \(kv_len of k\) in dimension 2",
        {"mask": ones(2, 1, 4, **BOOL)},
    ),
    (
        "mask of two queries",
        ValueError,
        r"mask: expected size 1 \(one query of each sequence\) in dimension 1",
        {"mask": ones(2, 2, 5, **BOOL)},
    ),
    (
        "mask of each head",
        ValueError,
        r"mask: expected size 1 \(one query of each sequence\) in dimension 1",
        {"mask": ones(2, 6, 1, 5, **BOOL)},
    ),
    (
        "mask 4-D of two queries",
        ValueError,
        r"mask: expected size 1 \(one query of each sequence\) in dimension 2",
        {"mask": ones(2, 1, 2, 5, **BOOL)},
    ),
]

BOTH = ones(2, 5, 6, 32)
OUTS: list[Case] = [
    ("out fp32", TypeError, "out: expected dtype bfloat16, got float32", {"out": OUT.float()}),
    ("out 3-D", ValueError, "out: expected shape of q, got 3-D", {"out": OUT[:, 0]}),
    (
        "out of another shape",
        ValueError,
        r"out: expected size 6 \(that of q\) in dimension 2",
        {"out": ones(2, 1, 3, 32)},
    ),
    (
        "out transposed",
        ValueError,
        "out: expected stride 1 in the last dimension",
        {"out": ones(2, 1, 32, 6).mT},
    ),
    (
        "out off 16 bytes",
        ValueError,
        "out: expected rows that start on 16 bytes",
        {"out": ones(2, 1, 6, 36)[..., :32]},
    ),
    (
        "out expanded",
        ValueError,
        "out: expected elements that share no memory",
        {"out": ones(1, 1, 6, 32).expand(2, 1, 6, 32)},
    ),
    ("out is q", ValueError, "out: expected memory of its own, .* of q", {"out": Q}),
    (
        "out in k",
        ValueError,
        "out: expected memory of its own, .* of k",
        {"out": K.view(-1)[-384:].view(2, 1, 6, 32)},
    ),
    (
        "out in v",
        ValueError,
        "out: expected memory of its own, .* of v",
        {"out": V.view(-1)[:384].view(2, 1, 6, 32)},
    ),
    (
        "out between the rows of k",
        ValueError,
        "out: expected memory of its own, .* of k",
        {"q": ones(2, 1, 3, 32), "k": BOTH[:, :, :3], "v": BOTH[:, :, :3], "out": BOTH[:, :1, 3:]},
    ),
]


def mask_in_out() -> dict[str, Any]:
    return {"out": OUT, "mask": OUT.view(torch.uint8).view(torch.bool).view(-1)[:10].view(2, 5)}


OTHERS: list[Case] = [
    (
        "out is the mask",
        ValueError,
        "out: expected memory of its own, .* of mask",
        mask_in_out(),
    ),
    (
        "return_lse a number",
        TypeError,
        "return_lse: expected a bool, got int",
        {"return_lse": 1},
    ),
    (
        "return_lse None",
        TypeError,
        "return_lse: expected a bool, got NoneType",
        {"return_lse": None},
    ),
    *(
        (
            f"scale {scale}",
            ValueError,
            f"scale: expected a number in .*, got {text}",
            {"scale": scale},
        )
        for scale, text in ((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (1e39, "1e"))
    ),
    ("scale a bool", TypeError, "scale: expected a float, got bool", {"scale": True}),
    ("scale of 0", ValueError, r"scale: expected a number in .*, got 0", {"scale": 0.0}),
    ("scale text", TypeError, "scale: expected a float, got str", {"scale": "1"}),
    ("scale a list", TypeError, "scale: expected a float, got list", {"scale": [1.0]}),
    ("q an array", TypeError, "q: expected a torch.Tensor, got numpy.", {"q": numpy.ones(64)}),
    ("k None", TypeError, "k: expected a torch.Tensor, got NoneType", {"k": None}),
    ("v a list", TypeError, "v: expected a torch.Tensor, got list", {"v": [1.0]}),
    ("mask a list", TypeError, "mask: expected a torch.Tensor, got list", {"mask": [True]}),
    ("out a number", TypeError, "out: expected a torch.Tensor, got int", {"out": 1}),
    ("q meta", TypeError, "q: expected a dense tensor with storage", {"q": Q.to("meta")}),
    ("k meta", TypeError, "k: expected a dense tensor with storage", {"k": K.to("meta")}),
    ("mask meta", TypeError, "mask: expected a dense tensor", {"mask": MASK.to("meta")}),
    ("v sparse", TypeError, "v: expected a dense tensor with storage", {"v": V.to_sparse()}),
    ("q dispatches", TypeError, "q: expected a plain torch.Tensor", {"q": TwoTensor(Q, Q)}),
]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [case[1:] for case in (*SHAPES, *LAYOUTS, *MASKS, *OUTS, *OTHERS)],
    ids=[case[0] for case in (*SHAPES, *LAYOUTS, *MASKS, *OUTS, *OTHERS)],
)
def test_errors(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        attn_decode(**{"q": Q, "k": K, "v": V, **changes})


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "out"])
def test_fake_tensors_are_refused_before_their_memory_is_looked_at(name: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V, "mask": MASK, "out": OUT}
    with FakeTensorMode() as mode:
        arguments[name] = mode.from_tensor(arguments[name])
    with pytest.raises(TypeError, match=rf"{name}: expected a plain torch\.Tensor, got a Fake"):
        attn_decode(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, Tensor.requires_grad_])
def test_gradients_are_not_lost(name: str, kind: Callable[[Tensor], Tensor]) -> None:
    arguments = {"q": Q, "k": K, "v": V, "out": OUT}
    arguments[name] = kind(arguments[name].clone())
    with pytest.raises(RuntimeError, match=f"{name}: requires grad, and attn_decode has no back"):
        attn_decode(**arguments)
    with torch.no_grad(), pytest.raises(ValueError, match=DEVICE):
        attn_decode(**arguments)
