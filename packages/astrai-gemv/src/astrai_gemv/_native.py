# SPDX-License-Identifier: Apache-2.0
"""The compiled module, or a stand-in that says at the first call why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from . import _family

if TYPE_CHECKING:
    from . import _gemv as native
else:

    class _Missing:
        def __init__(self, reason: str, cause: BaseException) -> None:
            self._reason = reason
            self._cause = cause

        def __getattr__(self, name: str) -> NoReturn:
            raise RuntimeError(f"astrai_gemv.{name}: {self._reason}") from self._cause

    def _load() -> Any:
        try:
            from . import _gemv
        except ImportError as error:
            if _family.CUDA is None:
                reason = "this wheel was built without kernels (CSRC_KERNELS=false)"
            else:
                reason = f"the compiled module does not load ({error})"
            # pip's cache may hold this very wheel.
            command = "pip install --force-reinstall --no-cache-dir --no-deps astrai-gemv"
            return _Missing(f"{reason}; {command}", error)
        return _gemv

    native = _load()

__all__ = ["native"]
