# SPDX-License-Identifier: Apache-2.0
"""The implementations of attention: kernels of the attention family, flash-attn, torch."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from astrai_core import arch, device, discovery
from astrai_core.policy import OpSpec, kernel_for, observer
from astrai_core.reasons import one_line

from . import _sdpa
from .step import FAMILY, Step

__all__ = ["AttentionBackend", "CudaBackend", "FlashAttnBackend", "Forward", "TorchNativeBackend"]

Forward = Literal["decode", "prefill"]

HEAD_DIMS = (32, 64, 128, 256)
"""Head sizes that the family's attention kernels are made for."""


class AttentionBackend(ABC):
    """An implementation of attention; derive from it for one of your own.

    Attributes:
        name: what `explain` and errors call it; the name of its class where it has no other.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Step | None = None,
        layer_id: int = 0,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        fwd: Forward | None = None,
    ) -> Tensor:
        """`attention`, for operands that it has checked and `why_not` has no objection to.

        With a cache it also stores k and v in it.
        """

    def unavailable(self) -> str | None:
        """Why it can serve no call on this machine, or None."""
        return None

    def why_not(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Step | None = None,
        layer_id: int = 0,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        fwd: Forward | None = None,
    ) -> str | None:
        """Why it cannot serve a call of `forward`, as a sentence; None if it can."""
        del q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd
        return self.unavailable()

    @staticmethod
    def _check_fwd(fwd: str | None) -> None:
        if fwd not in (None, "decode", "prefill"):
            raise ValueError(f"fwd: expected 'decode', 'prefill' or None, got {fwd!r}")


class CudaBackend(AttentionBackend):
    """The attention family's kernels: bf16, no gradients; masks without a cache only."""

    name = "cuda"

    def unavailable(self) -> str | None:
        """Why the family serves no GPU of this machine, or None."""
        reasons = [discovery.find(FAMILY).reason_on(index) for index in range(device.count())]
        if None in reasons:
            return None
        family = discovery.find(FAMILY)
        return str(family.reason or (reasons[0] if reasons else device.why_none()))

    def why_not(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Step | None = None,
        layer_id: int = 0,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        fwd: Forward | None = None,
    ) -> str | None:
        """Why the kernels cannot serve a call, or None."""
        del layer_id, is_causal
        if kv_cache is None and fwd is None:
            return "without a cache its kernels are for fwd='decode' and 'prefill' only"
        if kv_cache is not None and attn_mask is not None:
            return "attn_mask: its kernels over a cache take none"
        if 0 in q.shape or 0 in k.shape:
            return "there is nothing to compute"
        if q.shape[-1] not in HEAD_DIMS:
            return f"head_dim = {q.shape[-1]}: its kernels take {', '.join(map(str, HEAD_DIMS))}"
        operands = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
        obstacle = _obstacle_in(operands) or observer()
        if obstacle is not None:
            return obstacle
        return kernel(_op(kv_cache, fwd), q.get_device())[1]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Step | None = None,
        layer_id: int = 0,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        fwd: Forward | None = None,
    ) -> Tensor:
        """Runs the kernel for the call."""
        self._check_fwd(fwd)
        op = _op(kv_cache, fwd)
        run, why = kernel(op, q.get_device())
        if run is None:
            raise RuntimeError(f"attention: {why}")
        if kv_cache is None:
            if attn_mask is not None:
                attn_mask = attn_mask.squeeze(1) if attn_mask.dim() == 4 else attn_mask
                attn_mask = attn_mask.contiguous()
            y: Tensor = run(_on_16_bytes(q), *_in_rows(k, v), attn_mask, is_causal)
            return y
        q, k, v = (_on_16_bytes(x) for x in (q, k, v))
        step = kv_cache
        size = step.page_size
        if op == "attn_paged_decode":
            q_rows, k_rows, v_rows = (
                step.packed(name, x)[:, None] for name, x in (("q", q), ("k", k), ("v", v))
            )
            pools = step.pools(layer_id)
            # The kernel stores the new token itself.
            y = run(
                q_rows,
                *pools,
                step.page_table,
                step.seq_lens,
                page_size=size,
                new_k=k_rows,
                new_v=v_rows,
            )
        else:
            step.write(layer_id, k, v)
            y = run(
                step.packed("q", q),
                *step.pools(layer_id),
                step.page_table,
                step.qo_indptr,
                step.kv_indptr,
                step.q_tile_to_batch,
                step.q_tile_to_index,
                page_size=size,
                is_causal=is_causal,
            )
        return y.view(q.shape)


class FlashAttnBackend(AttentionBackend):
    """`flash_attn_varlen_func` of the package flash-attn, over keys and values gathered flat."""

    name = "flash"

    def unavailable(self) -> str | None:
        """Why flash-attn serves no GPU of this machine, or None."""
        reasons = [_flash_on(index) for index in range(device.count())]
        gpus = None if None in reasons else (reasons[0] if reasons else device.why_none())
        return flash_attn()[1] or gpus

    def why_not(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Step | None = None,
        layer_id: int = 0,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        fwd: Forward | None = None,
    ) -> str | None:
        """Why flash-attn cannot serve a call, or None."""
        del layer_id, kv_cache, is_causal, fwd
        why = flash_attn()[1]
        if why is not None:
            return why
        if attn_mask is not None:
            return "attn_mask: flash-attn takes none"
        if 0 in q.shape or 0 in k.shape:
            return "there is nothing to compute"
        if q.dtype not in (torch.bfloat16, torch.float16) or {k.dtype, v.dtype} != {q.dtype}:
            return "flash-attn takes bfloat16 or float16"
        if q.shape[-1] > 256 or q.shape[-1] % 8:
            return f"head_dim = {q.shape[-1]}: flash-attn takes multiples of 8 up to 256"
        if any(x.get_device() < 0 for x in (q, k, v)):
            return "an operand is not on a CUDA device"
        return _flash_on(q.get_device())

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Step | None = None,
        layer_id: int = 0,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        fwd: Forward | None = None,
    ) -> Tensor:
        """Runs flash-attn on the packed operands."""
        self._check_fwd(fwd)
        run, why = flash_attn()
        if run is None or attn_mask is not None:
            raise RuntimeError(f"attention: {why or 'attn_mask: flash-attn takes none'}")
        if kv_cache is None:
            cu_q, cu_k = (_even_indptr(x) for x in (q, k))
            max_q, max_k = q.shape[1], k.shape[1]
            flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
        else:
            kv_cache.write(layer_id, k, v)
            flat_q = kv_cache.packed("q", q)
            flat_k, flat_v = kv_cache.gather(layer_id)
            cu_q, cu_k = kv_cache.qo_indptr, kv_cache.kv_indptr
            max_q, max_k = kv_cache.max_q_len, kv_cache.max_kv_len
        y: Tensor = run(flat_q, flat_k, flat_v, cu_q, cu_k, max_q, max_k, causal=is_causal)
        # It has the strides of the operands, which may be a view's.
        return y.reshape(q.shape).contiguous()


class TorchNativeBackend(AttentionBackend):
    """`torch.nn.functional.scaled_dot_product_attention`: every call, with gradients."""

    name = "torch_native"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Step | None = None,
        layer_id: int = 0,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        fwd: Forward | None = None,
    ) -> Tensor:
        """Runs torch, over a copy of the cached tokens where there is a cache."""
        self._check_fwd(fwd)
        if kv_cache is None:
            return _sdpa.dense(q, k, v, attn_mask, is_causal)
        kv_cache.write(layer_id, k, v)
        return _sdpa.over_step(q, kv_cache, layer_id, attn_mask, is_causal)


def _op(step: Step | None, fwd: Forward | None) -> str:
    if step is None:
        return f"attn_{fwd}"
    return "attn_paged_decode" if step.max_q_len == 1 else "attn_paged_prefill"


def kernel(op: str, gpu: int) -> tuple[Callable[..., Any] | None, str | None]:
    """An op of the attention family for a device, or why there is none."""
    run, why = kernel_for(OpSpec("attention", FAMILY, op, "ASTR_BACKEND"), gpu)
    if op == "attn_paged_prefill" and why is None:
        family = discovery.find(FAMILY)
        if family.q_tile_rows is None:
            what = f"{family.distribution} {family.version} names no Q_TILE_ROWS in its manifest"
            return None, f"{what}; pip install -U {family.distribution}"
    return run, why


def _obstacle_in(operands: tuple[Tensor, ...]) -> str | None:
    """What in the operands of a call rules the bf16 kernels out; the fourth is a mask."""
    grad = torch.is_grad_enabled()
    place = operands[0].get_device()
    for index, tensor in enumerate(operands):
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            return f"{type(tensor).__name__} is no plain tensor"
        if index < 3 and tensor.dtype is not torch.bfloat16:
            dtype = str(tensor.dtype).removeprefix("torch.")
            return f"{dtype} operands: its kernels take bfloat16"
        if grad and tensor.requires_grad:
            return "training: an operand requires grad, and its kernels have no backward"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return "an operand is sparse or nested"
        if tensor.get_device() != place:
            return "operands on different devices"
    return "q is not on a CUDA device" if place < 0 else None


def _on_16_bytes(x: Tensor) -> Tensor:
    """X, contiguous and where the kernels' copies may start; a slice may begin anywhere."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _in_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and v as the dense kernels take them: one layout, whose rows are whole and on 16 bytes.

    The order of the other dimensions is free: a cache of heads first is read where it lies, and not
    copied at every token.
    """
    strides = k.stride()
    whole = strides[-1] == 1 and not any(stride % 8 for stride in strides[:-1])
    if whole and strides == v.stride() and not (k.data_ptr() | v.data_ptr()) % 16:
        return k, v
    return _on_16_bytes(k), _on_16_bytes(v)


@functools.cache
def flash_attn() -> tuple[Callable[..., Any] | None, str | None]:
    """``flash_attn_varlen_func``, imported at the first question, or why there is none."""
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func, None
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return None, "flash-attn is not installed; pip install flash-attn"
        return None, f"importing flash_attn failed: {error}"
    except Exception as error:  # noqa: BLE001 (whatever a build for another torch raises)
        return None, f"importing flash_attn failed: {one_line(error)}"


def _flash_on(gpu: int) -> str | None:
    """Why flash-attn does not run on a device, or None."""
    capability = device.capability(gpu)
    if capability is None:
        return device.why_none()
    if capability < (8, 0):
        return f"cuda:{gpu} is sm_{arch.name(capability)}, flash-attn needs sm_80 or newer"
    return None


def _even_indptr(x: Tensor) -> Tensor:
    """Where each sequence of a dense batch begins, once it is flat."""
    batch, length = x.shape[:2]
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=x.device)
