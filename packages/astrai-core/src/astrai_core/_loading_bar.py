# SPDX-License-Identifier: Apache-2.0
"""The progress of loading a model, on a terminal or in a log."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FOLDER_STAGES", "GGUF_STAGES", "LoadingBar"]

# Stages of loading with the seconds they take for SmolLM2-135M on two cores: the bar's scale.
FOLDER_STAGES = {
    "importing transformers": 1.0,
    "reading the tokenizer": 0.5,
    "preparing weights": 0.2,
    "placing weights": 0.8,
}
GGUF_STAGES = {
    "importing transformers": 1.0,
    "reading the configuration": 3.1,
    "reading the tokenizer": 2.9,
    "preparing weights": 7.4,
    "dequantizing tensors": 1.4,
    "placing weights": 0.1,
}


class LoadingBar:
    """A progress bar over stages of known length; a context manager.

    On a terminal it is one line that is redrawn, also while a stage says nothing, so that it can
    be told from a standstill. Elsewhere each finished stage is a line.
    """

    def __init__(self, stages: dict[str, float], stream: TextIO) -> None:
        self._stages, self._stream = stages, stream
        self._live = stream.isatty()
        self._start = self._stage_start = time.perf_counter()
        self._name = ""
        self._done = self._fraction = 0.0
        self._over = threading.Event()
        self._painter = threading.Thread(target=self._paint, daemon=True)

    def at(self, name: str, fraction: float = 0.0) -> None:
        """Says how far loading is.

        Args:
            name: a stage, in their order; some may be left out.
            fraction: how much of it is done, from 0 to 1.
        """
        if name != self._name:
            self._finish_stage()
            names = list(self._stages)
            self._done = sum(self._stages[before] for before in names[: names.index(name)])
            self._name, self._stage_start = name, time.perf_counter()
        self._fraction = fraction

    def __str__(self) -> str:
        done = self._done + self._fraction * self._stages.get(self._name, 0.0)
        share = done / sum(self._stages.values())
        bar = "#" * int(share * 24)
        seconds = time.perf_counter() - self._start
        return f"loading {share:4.0%} [{bar:24}] {seconds:4.1f} s  {self._name}"

    def __enter__(self) -> Self:
        if self._live:
            self._painter.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish_stage()
        self._over.set()
        if self._live:
            self._painter.join()
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _finish_stage(self) -> None:
        if self._name and not self._live:
            seconds = time.perf_counter() - self._stage_start
            print(f"{self._name}: {seconds:.1f} s", file=self._stream, flush=True)

    def _paint(self) -> None:
        while not self._over.wait(0.1):
            self._stream.write(f"\r{self}\x1b[K")
            self._stream.flush()
