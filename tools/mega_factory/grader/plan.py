# SPDX-License-Identifier: Apache-2.0
"""What is drawn for a run, and what was seen of it."""

from __future__ import annotations

import dataclasses
import random

from torch import Tensor

from .checks import Observed


def warm_up(steps: int) -> int:
    """How many steps of a run are not timed, of as many as a run that does not end early has."""
    return max(1, steps // 4)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What cannot be foreseen of a run.

    Attributes:
        steps: how many are decoded.
        look: after how many the memory is read, besides after all; 0 for never.
        rewrite: after how many the cache's first tokens are replaced; 0 for never.
    """

    steps: int
    look: int
    rewrite: int

    @classmethod
    def draw(cls, steps: int, source: random.Random, *, early: bool) -> Plan:
        """Of at most `steps`, of fewer if it is to end early."""
        if early and steps > 2:
            steps = source.randrange(max(2, steps // 2), steps)
        look, rewrite = (source.randrange(1, steps) if steps > 1 else 0 for _ in range(2))
        return cls(steps, look, rewrite)


@dataclasses.dataclass
class Seen:
    """A run's steps, and every tensor on the CPU as it was at `Plan.look`, by path."""

    steps: Observed = dataclasses.field(default_factory=Observed)
    memory: dict[str, Tensor] = dataclasses.field(default_factory=dict)
