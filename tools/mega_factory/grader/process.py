# SPDX-License-Identifier: Apache-2.0
"""The solution's process, seen from the grading process: requests, deadline, children, its end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .report import Finding, SolutionError
from .worker import FRAME, PR_SET_CHILD_SUBREAPER, send

# A solution must not find the grader's modules by their names, so the worker is no script.
BOOT = """
import importlib.util, pathlib, sys
folder, descriptor, device, reference = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "grader", folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules["grader"] = importlib.util.module_from_spec(spec)
from grader.worker import main
main(int(descriptor), device, pathlib.Path(reference))
"""

# An answer's fields, with their types in JSON.
Fields = dict[str, "type | tuple[type, ...]"]

# No answer has a longer header; a longer one is a solution that writes to the socket.
MAX_HEADER = 1 << 20
LOG_LINES = 12
PROC = Path("/proc")
PR_GET_CHILD_SUBREAPER = 37

# What the solution's time limit is for; for the rest, the grader's own work, there is another.
SOLUTIONS_WORK = {"solution", "build", "step", "teardown", "wait", "finish"}
GRADERS_LIMIT_S = 600.0
# A GPU takes a while to stop a kernel that runs on.
KILL_S = 60.0
POLL_S = 0.01

# Of the words of stat from the state on: cminflt, cmajflt, cutime and cstime.
REAPED = (8, 10, 13, 14)


class Worker:
    """A fresh process, which nothing of the solution outlives once it is closed.

    Orphans below it come to it or, if it ended or gave them up, to the grading process: while there
    is a worker, every process that comes to be below that one counts as the solution's.

    Args:
        time_limit: seconds that the solution may take for all that it is asked together.
        device: `cpu` or `cuda`.
        reference: the bundle's reference.py.
    """

    def __init__(self, time_limit: float, device: str, reference: Path) -> None:
        self.time_limit = time_limit
        self.left = time_limit
        # A file, not a pipe: a solution that prints a lot must not wait for a reader.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - until close()
        self.ended: set[int] = set()
        self.reaped: list[int] = []
        self.was_subreaper = take_orphans(1)
        self.others = set(below(os.getpid()))
        self.channel, other = socket.socketpair()
        arguments: list[str | Path] = [
            Path(__file__).parent,
            str(other.fileno()),
            device,
            reference,
        ]
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, *arguments],
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
        self.process.kill()
        limit = time.monotonic() + KILL_S
        # Again, for those that were started meanwhile; orphans have come to this process.
        while (started := self.started()) and time.monotonic() < limit:
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(POLL_S)
        self.process.wait(KILL_S)
        take_orphans(self.was_subreaper)
        self.channel.close()
        self.log.close()

    def request(
        self,
        command: dict[str, Any],
        phase: str,
        *,
        fields: Fields | None = None,
        payload: memoryview | None = None,
        within: float = math.inf,
    ) -> dict[str, Any]:
        """Sends a command and waits for its answer.

        Args:
            command: `do` names one of the worker's, the rest are its arguments.
            phase: what it is doing meanwhile, for findings.
            fields: what the answer holds.
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
            answer = self._exchange(command, fields or {}, payload, start + min(seconds, within))
        except TimeoutError:
            if within < seconds:
                raise
            limit = self.time_limit if solutions else GRADERS_LIMIT_S
            detail = f"more than {limit:g} s in all, now in {phase}"
            raise SolutionError(Finding("time_limit", detail)) from None
        except OSError:
            raise SolutionError(Finding("crash", self._epitaph(phase))) from None
        except (ValueError, RecursionError) as error:
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
        fields: Fields,
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
        if not isinstance(answer, dict):
            raise ValueError(f"expected an object, got {answer!r}")  # noqa: TRY004 - of the protocol
        for name, wanted in ({} if "error" in answer else fields).items():
            if name not in answer or not isinstance(answer[name], wanted):
                raise ValueError(f"expected {name} of {wanted}, got {answer!r}")
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

    def settle(self, phase: str) -> None:
        """Takes note of the children that have ended by now, before the first step.

        Raises:
            SolutionError: a child is alive.
        """
        self.check_children(phase)
        self.ended = set(self.started())
        self.reaped = self._reaped()

    def started(self) -> list[int]:
        """Processes that the solution started, wherever they are below this one; zombies too."""
        return [pid for pid in below(os.getpid(), self.others) if pid != self.process.pid]

    def check_children(self, phase: str) -> None:
        """Raises SolutionError if a process that the solution started is alive."""
        for pid in filter(is_live, self.started()):
            detail = (
                f"a process that the solution started is alive after {phase}: {command_of(pid)!r}"
            )
            raise SolutionError(Finding("child_process", detail))

    def check_step(self) -> None:
        """Looks for children that a step has had, after it.

        One that ended unseen is known by what it leaves: a zombie, or page faults and time that the
        kernel adds to its parent's when that waits for it. It leaves nothing where SIGCHLD is
        ignored, so that it must not be; nor with SA_NOCLDWAIT, which does not show.

        Raises:
            SolutionError: a child is alive, or was started since `settle`.
        """
        self.check_children("decode_step")
        ignored = ignores_children(self.process.pid)
        if ignored or set(self.started()) - self.ended or self._reaped() != self.reaped:
            what = "ignores SIGCHLD" if ignored else "had a child process that ended"
            raise SolutionError(Finding("child_process", f"the solution {what} in decode_step"))

    def _reaped(self) -> list[int]:
        """Page faults, minor and major, and time, user and system, of children waited for."""
        words = stat_of(PROC / str(self.process.pid)) or []
        return [int(words[index]) for index in REAPED if index < len(words)]


def stat_of(folder: Path) -> list[str] | None:
    """The words of a process's or thread's stat from its state on; None if it has ended."""
    try:
        # The name, in parentheses, may itself hold some.
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def command_of(pid: int) -> str:
    """A process's command line, or nothing if it has ended since, or its first thread has."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()


def ignores_children(pid: int) -> bool:
    """Whether a process ignores SIGCHLD: its children are then not accounted for."""
    try:
        status = (PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return False
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)


def is_live(pid: int) -> bool:
    """Whether any thread of a process runs; its own state is of the first, which may have ended."""
    return any(
        words is not None and words[0] not in "ZX"
        for words in map(stat_of, (PROC / str(pid) / "task").glob("*"))
    )


def take_orphans(flag: int) -> int:
    """Has orphans below this process come to it, or not if 0; returns the flag of before."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, flag, 0, 0, 0)
    return before.value


def below(pid: int, without: Collection[int] = ()) -> list[int]:
    """Processes below `pid`, zombies too, parents before their children.

    `without` those given, and what is below them.
    """
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal() and (words := stat_of(folder)):
            children.setdefault(int(words[1]), []).append(int(folder.name))
    found, parents = [], [pid]
    for parent in parents:
        new = [child for child in children.get(parent, []) if child not in without]
        found += new
        parents += new
    return found
