# SPDX-License-Identifier: Apache-2.0
"""Decode under torch.compile without a GPU: fakes, traces, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai_attention import attn_decode, attn_paged_decode

BF16, INT32 = torch.bfloat16, torch.int32
OPS = torch.ops.astrai_attention


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def contiguous() -> tuple[Tensor, Tensor, Tensor]:
    return ones(2, 1, 6, 32), ones(2, 5, 3, 32), ones(2, 5, 3, 32)


def paged() -> tuple[Tensor, ...]:
    table, lengths = ones(2, 3, dtype=INT32), ones(2, dtype=INT32)
    return ones(2, 1, 6, 32), ones(7, 4, 3, 32), ones(7, 4, 3, 32), table, lengths


def new_token() -> tuple[Tensor, Tensor]:
    return ones(2, 1, 3, 32), ones(2, 1, 3, 32)


def test_fakes_give_shapes() -> None:
    with FakeTensorMode():
        q, k, v = contiguous()
        sliced = ones(2, 1, 12, 32)[:, :, 6:]
        cache, new = paged(), new_token()
        for result in (
            OPS.attn_decode(q, k, v, None, None),
            OPS.attn_decode(sliced, k, v, ones(2, 5, dtype=torch.bool), 0.5),
            OPS.attn_paged_decode(*cache, 4, None),
            OPS.attn_paged_decode_append(*cache, 4, *new, 1.0),
        ):
            out, lse = result
            assert out.shape == (2, 1, 6, 32) and out.dtype == BF16 and out.is_contiguous()
            assert lse.shape == (2, 6, 1) and lse.dtype == torch.float32 and lse.is_contiguous()
        out = torch.empty_like(q)
        written = (out, None, None)
        assert OPS.attn_decode_out(q, k, v, None, None, *written) is None
        assert OPS.attn_paged_decode_out(*cache, 4, None, *written) is None
        assert OPS.attn_paged_decode_append_out(*cache, 4, *new, None, *written) is None


def test_fakes_say_what_is_wrong() -> None:
    with FakeTensorMode():
        q, k, v = contiguous()
        _, k_pool, v_pool, table, lengths = paged()
        with pytest.raises(TypeError, match="q: expected dtype bfloat16"):
            OPS.attn_decode(q.float(), k, v, None, None)
        with pytest.raises(ValueError, match="k: expected 4 dimensions, got 3-D"):
            OPS.attn_decode(q, k[0], v, None, None)
        with pytest.raises(ValueError, match=r"q: expected size 1 \(one token of each sequence\)"):
            OPS.attn_decode(q.expand(2, 3, 6, 32), k, v, None, None)
        with pytest.raises(ValueError, match=r"k: expected size 32 \(head_dim of q\)"):
            OPS.attn_decode(q, k[..., :16], v, None, None)
        with pytest.raises(ValueError, match=r"v_pool: expected the shape of k_pool \[7, 4, 3"):
            OPS.attn_paged_decode(q, k_pool, v_pool[:3], table, lengths, 4, None)
        with pytest.raises(TypeError, match="v_pool: expected dtype bfloat16"):
            OPS.attn_paged_decode(q, k_pool, v_pool.half(), table, lengths, 4, None)


def test_only_what_is_written_is_declared_as_written() -> None:
    for name, written in {
        "attn_paged_decode_append": {"k_pool", "v_pool"},
        "attn_paged_decode_append_out": {"k_pool", "v_pool", "out", "lse", "workspace"},
    }.items():
        arguments = getattr(OPS, name).default._schema.arguments
        assert written == {a.name for a in arguments if a.is_write}, name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "append"])
def test_compiled_code_calls_the_operator(kind: str, with_out: bool, backend: str) -> None:
    """fullgraph tracing works; running on a CPU then ends in the op's own error."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def layer(spare: Tensor, *tensors: Tensor) -> Tensor:
        out = spare if with_out else None
        if kind == "contiguous":
            result, lse = attn_decode(*tensors, scale=0.5, return_lse=True, out=out)
            return result + lse[..., None]
        new_k, new_v = tensors[5:] or (None, None)
        return 1 + attn_paged_decode(*tensors[:5], page_size=4, new_k=new_k, new_v=new_v, out=out)

    tensors = {"contiguous": contiguous, "paged": paged, "append": lambda: (*paged(), *new_token())}
    with torch.no_grad(), pytest.raises(ValueError, match="q: expected a CUDA tensor"):
        layer(ones(2, 1, 6, 32), *tensors[kind]())


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("an input requires grad, and this op has no backward", {"k": ones(2, 5, 3, 32)}),
        ("return_lse: expected a bool, got int", {"return_lse": 1}),
    ],
)
def test_traced_calls_refuse_what_eager_ones_do(message: str, changes: dict[str, Any]) -> None:
    compiled = torch.compile(attn_decode, fullgraph=True, backend="eager")
    arguments = {**dict(zip("qkv", contiguous(), strict=True)), **changes}
    if "k" in changes:
        arguments["k"].requires_grad_()
    with pytest.raises(Exception, match=message):
        compiled(**arguments)


def test_traced_paged_calls_refuse_what_eager_ones_do() -> None:
    compiled = torch.compile(attn_paged_decode, fullgraph=True, backend="eager")
    new_k, new_v = new_token()
    with pytest.raises(Exception, match="new_k, new_v: expected both or neither"):
        compiled(*paged(), page_size=4, new_k=new_k)
    with pytest.raises(Exception, match="an input requires grad, and this op has no backward"):
        compiled(*paged(), page_size=4, new_k=new_k, new_v=new_v.requires_grad_())


@pytest.mark.parametrize("name", ["attn_decode", "attn_paged_decode"])
def test_the_functional_operators_refuse_backward(name: str) -> None:
    with FakeTensorMode():
        if name == "attn_decode":
            q, *rest = (*contiguous(), None, None)
        else:
            q, *rest = (*paged(), 4, None)
        with pytest.raises(RuntimeError, match="this op has no backward"):
            getattr(OPS, name)(q.requires_grad_(), *rest)
