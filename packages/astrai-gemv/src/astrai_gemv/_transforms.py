# SPDX-License-Identifier: Apache-2.0
"""What torch would transform a call by: a kernel has no derivative and no batching rule."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

NO_TRANSFORM = (
    "torch.func or forward-mode differentiation transforms the call, and this op has no derivative "
    "and no batching rule; compute what is transformed with torch's own operators"
)
# torch has no public questions for these.
_functorch: Any = getattr(torch._C, "_functorch", None)  # noqa: SLF001
_level = getattr(_functorch, "peek_interpreter_stack", lambda: None)


def refuse_forward_mode() -> None:
    """No rule of autograd is asked in it."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise RuntimeError(NO_TRANSFORM)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_transform() -> None:
    """Runs as Python, while tracing, when the levels that are traced are really open."""
    try:
        # torch._dynamo, which takes a second to import, is there in a trace. A torch that has lost
        # these names may use a trace in a level that is opened later; the module refuses that then.
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import GlobalStateSource
        from torch._guards import TracingContext

        if TracingContext.try_get() is not None:
            # Dynamo guards functorch's levels itself, those of forward mode only where it opens it.
            install_guard(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
    except (ImportError, AttributeError):
        pass
    if _level() is not None:
        raise RuntimeError(NO_TRANSFORM)
    refuse_forward_mode()
