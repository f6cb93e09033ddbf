# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import io
import time

from astrai_core._loading_bar import LoadingBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


STAGES = {"one": 1.0, "two": 2.0, "three": 1.0}


def test_the_bar_weighs_its_stages():
    bar = LoadingBar(STAGES, io.StringIO())
    bar.at("one")
    assert "  0% [" in str(bar)
    bar.at("two", 0.5)
    assert f" 50% [{'#' * 12:24}]" in str(bar)
    bar.at("three", 1.0)
    assert f"100% [{'#' * 24}]" in str(bar)


def test_the_bar_moves_on_a_terminal_and_cleans_up():
    stream = Terminal()
    with LoadingBar(STAGES, stream) as bar:
        bar.at("one")
        time.sleep(0.5)
    frames = stream.getvalue().split("\r")
    assert sum("one" in frame for frame in frames) >= 2
    assert frames[-1] == "\x1b[K"


def test_the_bar_is_lines_elsewhere_and_claims_nothing_on_failure():
    stream = io.StringIO()
    with contextlib.suppress(ValueError), LoadingBar(STAGES, stream) as bar:
        bar.at("one")
        bar.at("two")
        raise ValueError
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == ["one"]
