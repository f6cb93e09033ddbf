# SPDX-License-Identifier: Apache-2.0
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
def plan_gemv(
    *,
    m: int,
    n: int,
    k: int,
    row_stride: int,
    weight_address: int,
    x_address: int,
    swiglu: bool,
    static_weights: bool,
    device: DeviceInfo,
) -> dict[str, int | str | bool]: ...
def plan_add_rms_norm(
    *, hidden: int, aligned: bool, device: DeviceInfo
) -> dict[str, int | bool]: ...
def bf16_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    static_weights: bool,
) -> Tensor: ...
def bf16_swiglu(
    x: Tensor,
    up_weight: Tensor,
    gate_weight: Tensor,
    out: Tensor | None,
    static_weights: bool,
) -> Tensor: ...
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, static_weights: bool
) -> tuple[Tensor, Tensor]: ...
