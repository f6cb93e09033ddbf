# SPDX-License-Identifier: Apache-2.0
"""Decoding by the package that has all layers in one kernel, held to the contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from astrai_core.policy import VARIABLES, OpSpec, kernel_for
from astrai_core.reasons import one_line

from ._arguments import Problem

__all__ = ["MegakernelDecoder", "obstacle", "package_for"]

_SPEC = OpSpec("decode", "megakernel", "decode", VARIABLES["decode"][0])


def package_for(problem: Problem) -> tuple[Any, str | None]:
    """The functions of the package for a problem's device, or why there are none."""
    if problem.gpu < 0:
        return None, "the weights are not on a CUDA device"
    return kernel_for(_SPEC, problem.gpu)


def obstacle(problem: Problem, cfg: Mapping[str, Any]) -> tuple[Any, str | None]:
    """The functions of the package, or why they cannot serve a problem."""
    package, why = package_for(problem)
    if package is None:
        return None, why
    kind = "contiguous" if problem.cache.table is None else "paged"
    try:
        why = package.unsupported(dict(cfg), problem.cache.batch, problem.max_seq_len, kind)
    except Exception as error:  # noqa: BLE001 (whatever goes wrong there, the others can decode)
        why = f"unsupported() of the package failed: {one_line(error)}"
    return (package, None) if why is None else (None, str(why))


class MegakernelDecoder:
    """The package's own handle.

    It is given tensors without an autograd graph and the checked copy of the table, and what it
    returns is checked and copied: its logits may be a buffer that the next step writes to.
    """

    def __init__(self, package: Any, problem: Problem, cfg: Mapping[str, Any]) -> None:
        self._package = package
        self._shape = (problem.cache.batch, problem.config.vocab)
        self._dtype, self._device = problem.config.dtype, problem.device
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._positions = torch.arange(problem.max_seq_len, device=problem.device)[:, None]
            self._table = [] if problem.cache.table is None else [problem.cache.table]
            self._handle = package.build_model(
                _weights(problem), _cache(problem), dict(cfg), problem.max_seq_len
            )

    @torch.no_grad()
    def step(self, token_ids: Tensor, pos: int | Tensor) -> Tensor:
        """Logits ``[B, vocab]`` of the tokens after these.

        Raises:
            RuntimeError: the package returned something else.
        """
        if isinstance(pos, Tensor):
            # The same positions, of which one that is out of range is an assertion of the device.
            pos = self._positions.index_select(0, pos.reshape(-1)).view(pos.shape)
        return self._checked(self._package.decode_step(self._handle, token_ids, pos))

    def _checked(self, logits: Any) -> Tensor:
        if isinstance(logits, Tensor):
            fits = tuple(logits.shape) == self._shape and logits.device == self._device
            if fits and logits.dtype in (self._dtype, torch.float32):
                return logits.to(self._dtype, copy=True)
            found = f"{[*logits.shape]} in {logits.dtype} on {logits.device}"
        else:
            found = type(logits).__name__
        expected = f"{[*self._shape]} in {self._dtype} or torch.float32 on {self._device}"
        raise RuntimeError(f"megakernel: expected logits {expected}, got {found}")

    def close(self) -> None:
        """The package's `teardown`, which is optional."""
        teardown = getattr(self._package, "teardown", None)
        if teardown is not None:
            teardown(self._handle)

    def tensors(self) -> list[Tensor]:
        """What was allocated here."""
        return [self._positions, *self._table]


def _weights(problem: Problem) -> dict[str, Any]:
    weights = problem.weights
    found = {
        "embed": weights.embed,
        "final_norm": weights.final_norm,
        "layers": [dict(vars(layer)) for layer in weights.layers],
    }
    return found if problem.config.tied else {**found, "lm_head": weights.lm_head}


def _cache(problem: Problem) -> Any:
    cache = problem.cache
    if cache.table is None:
        return [*zip(cache.keys, cache.values, strict=True)]
    return {
        "k": [*cache.keys],
        "v": [*cache.values],
        "page_table": cache.table,
        "page_size": cache.page_size,
    }
