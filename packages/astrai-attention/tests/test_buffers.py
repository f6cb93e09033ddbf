# SPDX-License-Identifier: Apache-2.0
"""Preallocated lse and workspace of all ops without a GPU: errors, sizes, traces.

`out` is in the tests of each op's errors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_decode_plan import DEVICES, H200
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import astrai_attention
from astrai_attention import _attention, decode_workspace_size

BF16, FP32, INT32, UINT8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
ON_CPU = "q: expected a CUDA tensor, got one on the CPU"


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT32)


KV, POOL, TABLE = ones(2, 9, 3, 32), ones(7, 4, 3, 32), ones(2, 3, dtype=INT32)
MASK = torch.ones(2, 5, 9, dtype=torch.bool)
POOLS = {"k_pool": POOL, "v_pool": POOL.clone(), "page_table": TABLE, "page_size": 4}
OPS: dict[str, dict[str, Any]] = {
    "attn_decode": {"q": ones(2, 1, 6, 32), "k": KV, "v": KV, "mask": MASK[:, :1]},
    "attn_paged_decode": {"q": ones(2, 1, 6, 32), **POOLS, "seq_lens": ints(9, 9)},
    "attn_prefill": {"q": ones(2, 5, 6, 32), "k": KV, "v": KV, "mask": MASK},
    "attn_paged_prefill": {
        "q": ones(10, 6, 32),
        **POOLS,
        "qo_indptr": ints(0, 5, 10),
        "kv_indptr": ints(0, 9, 18),
        "q_tile_to_batch": ints(0, 1),
        "q_tile_to_index": ints(0, 0),
    },
}
LSE_SHAPES = {
    "attn_decode": (2, 6, 1),
    "attn_paged_decode": (2, 6, 1),
    "attn_prefill": (2, 6, 5),
    "attn_paged_prefill": (6, 10),
}
LAYOUTS = {
    "attn_decode": "[batch, q_heads, 1]",
    "attn_paged_decode": "[batch, q_heads, 1]",
    "attn_prefill": "[batch, q_heads, q_len]",
    "attn_paged_prefill": "[q_heads, total_q]",
}
EVERY = pytest.mark.parametrize("op", OPS)
DECODE = pytest.mark.parametrize("op", ["attn_decode", "attn_paged_decode"])


def call(op: str, **changes: Any) -> Any:
    return getattr(astrai_attention, op)(**{**OPS[op], **changes})


def raises(error: type[Exception], start: str) -> Any:
    """As pytest.raises, with the beginning of the message as plain text."""
    return pytest.raises(error, check=lambda e: str(e).startswith(start))


# --- errors ---------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_right_lse_passes_up_to_the_device(op: str, return_lse: bool) -> None:
    with raises(ValueError, ON_CPU):
        call(op, lse=ones(*LSE_SHAPES[op], dtype=FP32), return_lse=return_lse)


@EVERY
def test_errors_of_lse(op: str) -> None:
    shape, layout = LSE_SHAPES[op], LAYOUTS[op]
    lse = ones(*shape, dtype=FP32)
    with raises(TypeError, "lse: expected dtype float32, got bfloat16"):
        call(op, lse=lse.to(BF16))
    with raises(TypeError, "lse: expected a torch.Tensor, got bool"):
        call(op, lse=True)
    with raises(ValueError, f"lse: expected shape {layout}, got {len(shape) + 1}-D"):
        call(op, lse=lse[None])
    with raises(ValueError, f"lse: expected size {shape[0]} ({layout}) in dimension 0, got shape"):
        call(op, lse=ones(shape[0] + 1, *shape[1:], dtype=FP32))
    last = len(shape) - 1
    with raises(ValueError, f"lse: expected size {shape[-1]} ({layout}) in dimension {last}, got"):
        call(op, lse=ones(*shape[:-1], shape[-1] + 1, dtype=FP32))
    with raises(ValueError, "lse: expected a contiguous tensor, got shape"):
        call(op, lse=ones(*shape, 2, dtype=FP32)[..., 0])


@EVERY
def test_lse_has_memory_of_its_own(op: str) -> None:
    shape = LSE_SHAPES[op]
    count = torch.Size(shape).numel()
    for name, like in OPS[op].items():
        if isinstance(like, Tensor):
            memory = ones(max(like.numel() * like.element_size() // 4, count), dtype=FP32)
            shared = memory.view(like.dtype)[: like.numel()].view_as(like)
            with raises(ValueError, f"lse: expected memory of its own, got some between the first "
                                    f"and the last element of {name}"):  # fmt: skip
                call(op, **{name: shared}, lse=memory[:count].view(shape))
    memory = ones(OPS[op]["q"].numel(), dtype=FP32)
    out = memory.view(BF16)[: OPS[op]["q"].numel()].view_as(OPS[op]["q"])
    with raises(ValueError, "lse: expected memory of its own, got some between the first and the "
                            "last element of out"):  # fmt: skip
        call(op, out=out, lse=memory[:count].view(shape))


@EVERY
def test_lse_loses_no_gradient(op: str) -> None:
    lse = ones(*LSE_SHAPES[op], dtype=FP32).requires_grad_()
    with raises(RuntimeError, f"lse: requires grad, and {op} has no backward"):
        call(op, lse=lse)
    with torch.no_grad(), raises(ValueError, ON_CPU):
        call(op, lse=lse)


@DECODE
def test_errors_of_a_workspace(op: str) -> None:
    memory = ones(256, dtype=UINT8)
    # How much there has to be is known with the device.
    for right in (memory, memory[:0], memory[16:]):
        with raises(ValueError, ON_CPU):
            call(op, workspace=right)
    with raises(TypeError, "workspace: expected dtype uint8, got float32"):
        call(op, workspace=ones(64, dtype=FP32))
    with raises(TypeError, "workspace: expected a torch.Tensor, got int"):
        call(op, workspace=4096)
    with raises(ValueError, "workspace: expected shape [bytes], got 2-D [16, 16]"):
        call(op, workspace=memory.view(16, 16))
    with raises(ValueError, "workspace: expected a contiguous tensor, got shape [128]"):
        call(op, workspace=memory[::2])
    with raises(ValueError, "workspace: expected rows that start on 16 bytes, got an offset of 4"):
        call(op, workspace=memory[4:])


@DECODE
def test_a_workspace_has_memory_of_its_own(op: str) -> None:
    inputs = [name for name, x in OPS[op].items() if isinstance(x, Tensor)]
    written = {"out": ones(2, 1, 6, 32), "lse": ones(2, 6, 1, dtype=FP32)}
    for name in (*inputs, *written):
        x = {**OPS[op], **written}[name]
        memory = ones(x.numel() * x.element_size() + 16, dtype=UINT8)
        shared = memory[: x.numel() * x.element_size()].view(x.dtype).view_as(x)
        with raises(ValueError, "workspace: expected memory of its own, got some between the "
                                f"first and the last element of {name}"):  # fmt: skip
            call(op, **{name: shared}, workspace=memory)


def test_new_tokens_are_apart_from_what_is_written() -> None:
    tokens = {"new_k": ones(2, 1, 3, 32), "new_v": ones(2, 1, 3, 32)}
    for name in tokens:
        memory = ones(2 * 96 * 2, dtype=UINT8)
        new = {**tokens, name: memory.view(BF16).view(2, 1, 3, 32)}
        with raises(ValueError, "workspace: expected memory of its own, got some between the "
                                f"first and the last element of {name}"):  # fmt: skip
            call("attn_paged_decode", **new, workspace=memory)


@pytest.mark.parametrize("op", ["attn_prefill", "attn_paged_prefill"])
def test_prefill_takes_no_workspace(op: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'workspace'"):
        call(op, workspace=ones(256, dtype=UINT8))


# --- the size of a workspace ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("max_length", [0, 16, 512, 3073, 1 << 20])
def test_the_size_is_that_of_the_plan(name: str, max_length: int) -> None:
    problem = {"batch": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "max_length": max_length}
    size = decode_workspace_size(**problem, device=DEVICES[name])
    plan = _attention.plan_decode(**problem, is_exact=True, device=DEVICES[name])
    assert size == plan["workspace_bytes"]
    assert (size > 0) == (max_length > (3072 if DEVICES[name].image_arch >= 90 else 16))


def test_the_size_for_no_sequence() -> None:
    assert decode_workspace_size(
        batch=0, q_heads=8, kv_heads=8, head_dim=128, max_length=99, device=H200
    ) == 0  # fmt: skip


def test_errors_of_the_size() -> None:
    problem = {"batch": 1, "q_heads": 8, "kv_heads": 8, "head_dim": 128, "max_length": 99}
    with raises(ValueError, "head_dim: expected 32, 64, 128 or 256, got 96"):
        decode_workspace_size(**{**problem, "head_dim": 96}, device=H200)
    for index in (-1, 128):
        with raises(ValueError, f"device: expected an index below 128, got {index}"):
            decode_workspace_size(**problem, device=index)


# --- under torch.compile --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("op", "names"),
    [(op, names) for op in OPS for names in (("lse",), ("lse", "out"))]
    + [
        (op, names)
        for op in ("attn_decode", "attn_paged_decode")
        for names in (("workspace",), ("workspace", "lse", "out"))
    ],
)
def test_compiled_code_calls_the_operator(op: str, names: tuple[str, ...], backend: str) -> None:
    """fullgraph tracing works; running on a CPU then ends in the op's own error."""
    torch._dynamo.reset()
    q = OPS[op]["q"]
    buffers = {
        "out": torch.empty_like(q),
        "lse": ones(*LSE_SHAPES[op], dtype=FP32),
        "workspace": ones(256, dtype=UINT8),
    }

    @torch.compile(fullgraph=True, backend=backend)
    def layer(arguments: dict[str, Any], buffers: dict[str, Tensor]) -> Tensor:
        result = getattr(astrai_attention, op)(**arguments, **buffers)
        return result[0] + result[1].sum() if "lse" in buffers else result + 1

    with torch.no_grad(), pytest.raises(ValueError, match=ON_CPU):
        layer(OPS[op], {name: buffers[name] for name in names})


@EVERY
def test_what_is_written_is_declared(op: str) -> None:
    written = {"out", "lse", "workspace"} if "decode" in op else {"out", "lse"}
    ops = torch.ops.astrai_attention
    schemas = [getattr(ops, name).default._schema for name in (op, f"{op}_out")]
    assert [{a.name for a in s.arguments if a.is_write} for s in schemas] == [set(), written]


@EVERY
def test_fakes_of_the_operators(op: str) -> None:
    with FakeTensorMode() as mode:
        arguments = {
            k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in OPS[op].items()
        }
        schema = getattr(torch.ops.astrai_attention, op).default._schema
        defaults = {"is_causal": True, "scale": None, "mask": None}
        operands = [{**defaults, **arguments}[a.name] for a in schema.arguments]
        out, lse = getattr(torch.ops.astrai_attention, op)(*operands)
        assert out.shape == arguments["q"].shape and out.is_contiguous() and out.dtype == BF16
        assert lse.shape == LSE_SHAPES[op] and lse.dtype == FP32 and lse.is_contiguous()
        into = getattr(torch.ops.astrai_attention, f"{op}_out")
        rest = [None] * (len(into.default._schema.arguments) - len(operands) - 2)
        assert into(*operands, out, lse, *rest) is None
        assert into(*operands, out, None, *rest) is None
