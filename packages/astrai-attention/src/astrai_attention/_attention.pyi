# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

from torch import Tensor

class DeviceInfo:
    def __init__(
        self,
        *,
        sm_count: int,
        device_arch: int,
        image_arch: int,
        smem_per_sm: int,
        smem_per_block: int,
    ) -> None: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def device_arch(self) -> int: ...
    @property
    def image_arch(self) -> int: ...
    @property
    def smem_per_sm(self) -> int: ...
    @property
    def smem_per_block(self) -> int: ...

def device_info(device: int) -> DeviceInfo: ...
def plan_rotary(
    *, tokens: int, heads: int, head_dim: int, interleaved: bool, device: DeviceInfo
) -> dict[str, int | bool | tuple[int, ...]]: ...
def rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor | None
) -> Tensor: ...
def plan_decode(
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    max_length: int,
    is_exact: bool,
    device: DeviceInfo,
) -> dict[str, int | bool | str]: ...
def arrivals_held(device: int) -> int: ...
def set_dependent_launches(on: bool) -> None: ...
def attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    return_lse: bool,
    out: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attn_paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    page_size: int,
    new_k: Tensor | None,
    new_v: Tensor | None,
    scale: float | None,
    static_cache: bool,
    return_lse: bool,
    out: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def plan_prefill(
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    q_tiles: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    masked: bool,
    device: DeviceInfo,
) -> dict[str, int | bool | str | tuple[int, int]]: ...
def q_tile_schedule(
    q_lens: Sequence[int], tile_rows: int
) -> tuple[list[int], list[int], list[int]]: ...
def attn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    out: Tensor | None,
    lse: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attn_paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    q_tile_to_batch: Tensor,
    q_tile_to_index: Tensor,
    page_size: int,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    out: Tensor | None,
    lse: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]: ...
