# SPDX-License-Identifier: Apache-2.0
"""The process that a solution runs in. It does what the grading process asks, and judges nothing.

Commands come over one end of a socket pair: a solution that prints cannot forge an answer.

What a step needs is allocated, and every kernel of ours is loaded, before `build_model`: a kernel
that the solution leaves running may block allocation and loading for good. For the same reason
nothing here waits for more than the current stream until the solution is torn down.

A solution shares the process, and Python hides nothing from it: it can find what is here among the
garbage collector's objects or in the frames of its callers, or replace parts of torch. What it
would reach by a name is out of its way: commands are closures over what they call, bound before the
solution is imported, and the modules of the grader are not listed any more.
"""

from __future__ import annotations

import ctypes
import gc
import json
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

# By name: a solution that replaces time.perf_counter does not set the clock it is timed by.
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import data_of, load, make_inputs, plain_defaults, tensors_in, written

FRAME = struct.Struct("!IQ")
LOGITS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

PAUSE_S = 0.001

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

Answer = tuple[dict[str, Any], "Tensor | None"]
Command = Callable[[dict[str, Any]], Answer]


def send(channel: socket.socket, header: dict[str, Any], payload: Tensor | None = None) -> None:
    """Sends a JSON header and the bytes of a contiguous CPU tensor."""
    text = json.dumps(header).encode()
    size = 0 if payload is None else payload.numel() * payload.element_size()
    channel.sendall(FRAME.pack(len(text), size) + text)
    if payload is not None:
        channel.sendall(data_of(payload))


def receive(channel: socket.socket) -> dict[str, Any]:
    """The next command; ends the process when the grading process has gone."""
    frame = channel.recv(FRAME.size, socket.MSG_WAITALL)
    if len(frame) < FRAME.size:
        raise SystemExit(0)
    command: dict[str, Any] = json.loads(
        channel.recv(FRAME.unpack(frame)[0], socket.MSG_WAITALL).decode()
    )
    return command


class Clock(NamedTuple):
    """Times a step; `wait` waits for the current stream, `restore` makes ours current again."""

    begin: Callable[[], Any]
    end: Callable[[], Any]
    microseconds: Callable[[], float]
    wait: Callable[[], Any]
    restore: Callable[[], Any]


def host_clock() -> Clock:
    """On a CPU: by the host's clock."""
    now, times = perf_counter, [0.0, 0.0]

    def mark(index: int) -> None:
        times[index] = now()

    def nothing() -> None:
        pass

    return Clock(
        lambda: mark(0), lambda: mark(1), lambda: (times[1] - times[0]) * 1e6, nothing, nothing
    )


def gpu_clock() -> Clock:
    """On a GPU: by events on a stream that becomes the current one."""
    # Work on the default stream would wait for a kernel on any blocking stream.
    stream = torch.cuda.Stream()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    record, elapsed = torch.cuda.Event.record, torch.cuda.Event.elapsed_time
    wait, set_stream = torch.cuda.Stream.synchronize, torch.cuda.set_stream
    set_stream(stream)
    return Clock(
        lambda: record(first, stream),
        lambda: record(last, stream),
        lambda: elapsed(first, last) * 1e3,
        lambda: wait(stream),
        lambda: set_stream(stream),
    )


def solution_commands(run: SimpleNamespace, device: str, clock: Clock) -> dict[str, Command]:
    """What calls the solution, but for its steps."""
    names, import_file = ("build_model", "decode_step", "teardown"), load
    collect, synchronize = gc.collect, torch.cuda.synchronize

    def solution(command: dict[str, Any]) -> Answer:
        """Imports the solution, whose folder is importable."""
        path = Path(command["path"])
        sys.path.insert(0, str(path.parent))
        run.module = import_file(path, "solution")
        return {name: callable(getattr(run.module, name, None)) for name in names}, None

    def build(_: dict[str, Any]) -> Answer:
        """Calls `build_model`."""
        run.handle = run.module.build_model(run.weights, run.kv_cache, run.cfg, run.max_seq)
        clock.wait()
        return {}, None

    def teardown(_: dict[str, Any]) -> Answer:
        """Calls `teardown`."""
        run.module.teardown(run.handle)
        return {}, None

    def wait(_: dict[str, Any]) -> Answer:
        """Waits for the device: for ever if a kernel runs on."""
        if device == "cuda":
            synchronize()
        return {}, None

    def finish(_: dict[str, Any]) -> Answer:
        """Drops the run's memory, after waiting for the device."""
        wait({})
        for name in [name for name in vars(run) if name != "module"]:
            delattr(run, name)
        collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        return {}, None

    return {
        "solution": solution, "build": build, "teardown": teardown, "wait": wait, "finish": finish,
    }  # fmt: skip


def step_commands(run: SimpleNamespace, clock: Clock) -> dict[str, Command]:
    """What runs and describes a step."""
    copy, cpu, detach, tensor = Tensor.copy_, Tensor.cpu, Tensor.detach, torch.tensor
    alias, describe, rest = alias_of, description, sleep

    def timed(command: dict[str, Any], call: Callable[[Tensor, Any], Any]) -> Answer:
        """Runs one step and describes what it returned; times are microseconds."""
        tokens, pos = run.tokens[command["index"]], command["pos"]
        copy(tokens, tensor(command["tokens"], device="cpu"))
        if isinstance(pos, list):
            positions = run.positions[command["index"]]
            copy(positions, tensor(pos, device="cpu"))
            pos = positions
        clock.wait()
        clock.begin()
        result = call(tokens, pos)
        clock.end()
        # At once: work that the solution left on another stream has not been waited for.
        about = keep(result)
        clock.wait()
        return about | {"us": clock.microseconds()}, None

    def keep(result: Any) -> dict[str, Any]:
        """Copies logits on our stream, and describes them."""
        run.answer = None
        about = describe(result)
        if about["type"] == "Tensor":
            kept = run.kept.get(about["dtype"])
            clock.restore()
            if kept is not None and result.shape == kept.shape and result.device == kept.device:
                run.answer = copy(kept, detach(result))
            about["alias"] = alias(result, run)
        return about

    def rehearse(command: dict[str, Any]) -> Answer:
        """A step without a solution: what the grader itself costs around one."""

        def pause(_tokens: Tensor, _pos: Any) -> Tensor:
            # As long as a step: whoever waits for it takes a while to wake up.
            rest(PAUSE_S)
            logits: Tensor = run.kept["bfloat16"]
            return logits

        return timed(command, pause)

    def step(command: dict[str, Any]) -> Answer:
        """Calls `decode_step` once."""
        return timed(command, lambda tokens, pos: run.module.decode_step(run.handle, tokens, pos))

    def logits(_: dict[str, Any]) -> Answer:
        """The bytes of the last step's logits."""
        return {}, None if run.answer is None else cpu(run.answer)

    return {"rehearse": rehearse, "step": step, "logits": logits}


def description(result: Any) -> dict[str, Any]:
    """What a step returned, as JSON."""
    about: dict[str, Any] = {
        "type": type(result).__qualname__,
        "dtype": "",
        "shape": [],
        "device": "",
        "alias": None,
    }
    if type(result) is not Tensor:
        return about
    dtype = str(result.dtype).removeprefix("torch.")
    return about | {"dtype": dtype, "shape": list(result.shape), "device": result.device.type}


def alias_of(result: Tensor, run: SimpleNamespace) -> str | None:
    """The argument whose memory a tensor lies in; a buffer of the solution's own is no harm."""
    if result.layout != torch.strided:
        return None
    start, stop = memory_of(result)
    arguments: list[tuple[str, Tensor]] = [
        *run.tensors.items(),
        *(("token_ids", x) for x in run.tokens),
    ]
    arguments += [("pos", x) for x in run.positions]
    for path, tensor in arguments:
        begin, end = memory_of(tensor)
        if start < end and begin < stop:
            return path
    return None


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor's storage, and the one past its end."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def memory_commands(
    run: SimpleNamespace, device: str, clock: Clock, reference: Path
) -> dict[str, Command]:
    """What makes, changes and reads the memory that the solution is given."""
    module, make, defaults = load(reference, "reference"), make_inputs, plain_defaults
    del sys.modules["reference"]
    within, views, dumps, loads = tensors_in, written, json.dumps, json.loads
    copy, cpu, detach, contiguous = Tensor.copy_, Tensor.cpu, Tensor.detach, Tensor.contiguous

    def given() -> dict[str, Tensor]:
        """Every tensor that the solution is handed, by path, as the dicts are now."""
        return {**dict(within(run.weights, "weights")), **dict(within(run.kv_cache, "kv_cache"))}

    def inputs(command: dict[str, Any]) -> Answer:
        """Makes weights, cache, and all memory that later commands need."""
        scale = command["scale"]
        run.cfg, run.max_seq = scale["cfg"], scale["max_seq"]
        run.weights, run.kv_cache, other = make(
            module, scale | {"cfg": dict(run.cfg)}, command["run"], device
        )
        run.tensors = given()
        with defaults():
            allocate(run, scale, device)
            run.written = views(run.kv_cache, scale["prefill_lens"])
            run.others = views(other, scale["prefill_lens"])
        clock.wait()
        return {}, None

    def rewrite(_: dict[str, Any]) -> Answer:
        """Puts other tokens in the place of those that the cache came with."""
        for view, other in zip(run.written, run.others, strict=True):
            copy(view, other)
        clock.wait()
        return {}, None

    def state(_: dict[str, Any]) -> Answer:
        """What cfg is now, and the paths at which the given dicts hold another tensor."""
        now = given()
        paths = dict.fromkeys([*run.tensors, *now])
        replaced = [path for path in paths if now.get(path) is not run.tensors.get(path)]
        return {"cfg": loads(dumps(run.cfg, default=repr)), "replaced": replaced}, None

    def read(command: dict[str, Any]) -> Answer:
        """The bytes of one tensor that the solution was given."""
        return {}, contiguous(cpu(detach(run.tensors[command["path"]])))

    return {"inputs": inputs, "rewrite": rewrite, "state": state, "read": read}


def allocate(run: SimpleNamespace, scale: dict[str, Any], device: str) -> None:
    """Makes tensors for tokens, positions and logits, and loads the kernels that copy logits."""
    batch, steps = scale["batch"], scale["decode_steps"]
    # Every step has tensors of its own: a solution that keeps an old address reads old tokens.
    run.tokens, run.positions = (
        [torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(steps)]
        for _ in range(2)
    )
    shape = (batch, scale["cfg"]["vocab"])
    run.kept = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, dtype in LOGITS_DTYPES.items()
    }
    for kept in run.kept.values():
        # Of every layout that logits may have.
        kept.copy_(torch.zeros(shape[0], 2 * shape[1] + 1, dtype=kept.dtype).to(kept)[:, 1::2])
        kept.copy_(torch.zeros(shape[::-1], dtype=kept.dtype).to(kept).t())
        kept.cpu()


def serve(channel: socket.socket, table: dict[str, Command]) -> None:
    """Answers commands until the channel closes."""
    get, put, format_exception = receive, send, traceback.format_exception
    while True:
        command = get(channel)
        payload: Tensor | None = None
        try:
            reply, payload = table[command["do"]](command)
        except BaseException as error:  # noqa: BLE001 - a solution may raise anything, SystemExit too
            trace = "".join(format_exception(error))
            reply = {"error": type(error).__qualname__, "message": str(error), "trace": trace}
        put(channel, reply, payload)


def main(descriptor: int, device: str, reference: Path) -> None:
    """Serves a descriptor of a socket; `device` is `cpu` or `cuda`."""
    # Orphans of the solution come to this process, those that it gives up to the grading process.
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    clock = gpu_clock() if device == "cuda" else host_clock()
    run = SimpleNamespace()
    table: dict[str, Command] = {
        "start": lambda _: ({}, None),
        **solution_commands(run, device, clock),
        **step_commands(run, clock),
        **memory_commands(run, device, clock, reference),
    }
    package = __name__.partition(".")[0]
    # The grader's modules must neither be found by the solution nor hide its own.
    sys.path[:] = [path for path in sys.path if path]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    serve(channel, table)
