# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention over pages, where it is installed; it compiles at first use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernelkit.cases import DecodeCase

BF16 = torch.bfloat16


def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def workspace() -> Tensor:
    return torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)


def decodes(case: DecodeCase, table: Tensor) -> list[Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Its two kernels, planned for the case: without tensor cores, and with; none without it."""
    if not is_installed():
        return []
    import flashinfer

    def call(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(q[:, 0], (k, v))[:, None]

    calls = []
    for tensor_cores in (False, True):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(
            torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * table.shape[1],
            table.flatten(),
            torch.full((case.batch,), case.page, device="cuda", dtype=torch.int32),
            case.q_heads,
            case.kv_heads,
            case.head_dim,
            case.page,
            q_data_type=BF16,
            kv_data_type=BF16,
        )
        calls.append(partial(call, wrapper.run))
    return calls


def prefill(q: Tensor, k: Tensor, v: Tensor, table: Tensor, causal: bool) -> Callable[[], Tensor]:
    """Its mma.sync kernel for sequences of one length that fill their pages."""
    import flashinfer

    batch, seq, q_heads, head_dim = q.shape
    counts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="fa2")
    wrapper.plan(
        counts * seq,
        counts * table.shape[1],
        table.flatten(),
        torch.full((batch,), k.shape[1], device="cuda", dtype=torch.int32),
        q_heads,
        k.shape[2],
        head_dim,
        k.shape[1],
        causal=causal,
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    return lambda: wrapper.run(q.flatten(0, 1), (k, v)).view_as(q)
