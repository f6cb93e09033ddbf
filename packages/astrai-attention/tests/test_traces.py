# SPDX-License-Identifier: Apache-2.0
"""What a trace refuses: transforms and forward mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from astrai_attention import attn_decode, attn_prefill, rotary_emb
from kernelkit.transforms import TRANSFORMS, forward_mode

# Those are torch's own.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

REFUSED = "has no derivative and no batching rule"
X = torch.ones(2, 1, 2, 32, dtype=torch.bfloat16)
TABLE = torch.ones(1, 16)

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rotary_emb": lambda x: rotary_emb(x, TABLE, TABLE, interleaved=True),
    "attn_decode": lambda x: attn_decode(x, X, X),  # type: ignore[return-value]
    "attn_prefill": lambda x: attn_prefill(x, X, X),  # type: ignore[return-value]
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_traces_refuse_transforms(
    op: Callable[[Tensor], Tensor], transform: Callable[..., object]
) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=REFUSED):
        torch.compile(lambda: transform(op, X), backend="eager")()


def test_operators_refuse_forward_mode() -> None:
    import astrai_attention._library  # noqa: F401 (registers the operators)

    with pytest.raises(RuntimeError, match=REFUSED):
        forward_mode(lambda x: torch.ops.astrai_attention.rotary_emb(x, TABLE, TABLE, True), X)
