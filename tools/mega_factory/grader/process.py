# SPDX-License-Identifier: Apache-2.0
"""The solution's process, seen from the grading process: requests, deadline, children, its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .report import Finding, SolutionError
from .worker import FRAME, send

# No answer has a longer header; a longer one is a solution that writes to the socket.
MAX_HEADER = 1 << 20
LOG_LINES = 12
PROC = Path("/proc")

# What the solution's time limit is for; for the rest, the grader's own work, there is another.
SOLUTIONS_WORK = {"solution", "build", "step", "teardown", "finish"}
GRADERS_LIMIT_S = 600.0
# A GPU takes a while to stop a kernel that runs on.
KILL_S = 60.0


class Worker:
    """A fresh process, which nothing of the solution outlives once it is closed.

    Args:
        time_limit: seconds that the solution may take for all that it is asked together.
    """

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self.left = time_limit
        # A file, not a pipe: a solution that prints a lot must not wait for a reader.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - until close()
        self.channel, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("worker.py"), str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
                # Inductor's pool of compilers would outlive build_model.
                env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )

    def close(self) -> None:
        """Kills the process and all that it started; does nothing the second time."""
        if self.log.closed:
            return
        pid = self.process.pid
        # Stopped, it starts no more; killed before its children, it would leave them to init, where
        # they are not found. One that has ended has left those of its process group.
        self.process.send_signal(signal.SIGSTOP)
        for child in descendants(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.process.wait(KILL_S)
        self.channel.close()
        self.log.close()

    def request(
        self,
        command: dict[str, Any],
        phase: str,
        *,
        keys: tuple[str, ...] = (),
        payload: memoryview | None = None,
        within: float = math.inf,
    ) -> dict[str, Any]:
        """Sends a command and waits for its answer.

        Args:
            command: `do` names a method of the worker's session, the rest are its arguments.
            phase: what it is doing meanwhile, for findings.
            keys: what the answer holds.
            payload: filled with the answer's bytes, which must be as many.
            within: seconds to wait, if less than are left.

        Raises:
            SolutionError: it raised, ended, did not answer in time, or answered something else.
            TimeoutError: `within` has passed; another request cannot follow.
        """
        solutions = command["do"] in SOLUTIONS_WORK
        seconds = self.left if solutions else GRADERS_LIMIT_S
        start = time.monotonic()
        try:
            answer = self._exchange(command, keys, payload, start + min(seconds, within))
        except TimeoutError:
            if within < seconds:
                raise
            limit = self.time_limit if solutions else GRADERS_LIMIT_S
            detail = f"more than {limit:g} s in all, now in {phase}"
            raise SolutionError(Finding("time_limit", detail)) from None
        except OSError:
            raise SolutionError(Finding("crash", self._epitaph(phase))) from None
        except ValueError as error:
            detail = f"in {phase} the answer was not the worker's: {error}"
            raise SolutionError(Finding("protocol", detail)) from None
        if solutions:
            self.left -= time.monotonic() - start
        if "error" in answer:
            trace = "\n".join(str(answer.get("trace")).splitlines()[-LOG_LINES:])
            detail = f"in {phase}: {answer['error']}: {answer.get('message')}\n{trace}"
            raise SolutionError(Finding("exception", detail))
        return answer

    def _exchange(
        self,
        command: dict[str, Any],
        keys: tuple[str, ...],
        payload: memoryview | None,
        limit: float,
    ) -> dict[str, Any]:
        self._settimeout(limit)
        send(self.channel, command)
        frame = bytearray(FRAME.size)
        self._fill(memoryview(frame), limit)
        length, size = FRAME.unpack(frame)
        if length > MAX_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = bytearray(length)
        self._fill(memoryview(header), limit)
        answer = json.loads(header)
        if not isinstance(answer, dict) or not ("error" in answer or answer.keys() >= set(keys)):
            raise ValueError(f"expected an object with {', '.join(keys) or 'any'}, got {answer!r}")
        expected = 0 if payload is None or "error" in answer else len(payload)
        if size != expected:
            raise ValueError(f"expected {expected} bytes, got {size}")
        if payload is not None and expected:
            self._fill(payload, limit)
        return answer

    def _fill(self, target: memoryview, limit: float) -> None:
        while target:
            self._settimeout(limit)
            count = self.channel.recv_into(target)
            if not count:
                raise ConnectionResetError("end of file")
            target = target[count:]

    def _settimeout(self, limit: float) -> None:
        self.channel.settimeout(max(limit - time.monotonic(), 1e-3))

    def _epitaph(self, phase: str) -> str:
        """How the process ended, and the last that it printed."""
        try:
            status = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            how = "closed the grader's socket"
        else:
            how = f"exited with status {status}"
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        return "\n".join([f"the process {how}, in {phase}", *lines[-LOG_LINES:]])

    def check_children(self, phase: str) -> None:
        """Raises SolutionError if the process has a live child: only it may compute."""
        for pid in descendants(self.process.pid):
            try:
                words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended since
            command = b" ".join(words).decode(errors="replace").strip()
            detail = f"a process that the solution started is alive after {phase}: {command!r}"
            raise SolutionError(Finding("child_process", detail))


def descendants(pid: int) -> list[int]:
    """Live processes below `pid`, children before their own; zombies do not count."""
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:
            continue  # it has ended since
        # The name, in parentheses, may itself hold some.
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            children.setdefault(int(parent), []).append(int(folder.name))
    found = children.get(pid, [])
    for child in found:
        found.extend(children.get(child, []))
    return found
