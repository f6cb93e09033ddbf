# SPDX-License-Identifier: Apache-2.0
"""What torch may transform a function of one tensor by, for tests of ops that refuse it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

Op = Callable[[Tensor], Tensor]


def forward_mode(f: Op, x: Tensor) -> object:
    """Calls f on x with a tangent."""
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[Op, Tensor], object]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(lambda a: f(a).float().sum())(x),
    "vmap": lambda f, x: torch.vmap(f)(x[:, None]),
    "forward_mode": forward_mode,
}
