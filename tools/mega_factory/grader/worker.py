# SPDX-License-Identifier: Apache-2.0
"""The process that a solution runs in. It does what the grading process asks, and judges nothing.

Run as `python worker.py FD`, where FD is one end of a socket pair: a solution that prints cannot
forge an answer. This file imports nothing of the grader, so that it also runs as a plain script.

What a step needs is allocated, and every kernel of ours is loaded, before `build_model`: a kernel
that the solution leaves running may block allocation and loading for good. For the same reason
nothing here waits for more than the current stream until the solution is torn down.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

# By name: a solution that replaces time.perf_counter does not set the clock it is timed by.
from time import perf_counter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FRAME = struct.Struct("!IQ")
LOGITS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


# --- what both processes use ----------------------------------------------------------------------


def data_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not a copy: the caller keeps the tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def send(channel: socket.socket, header: dict[str, Any], payload: Tensor | None = None) -> None:
    """Sends a JSON header and the bytes of a contiguous CPU tensor."""
    text = json.dumps(header).encode()
    size = 0 if payload is None else payload.numel() * payload.element_size()
    channel.sendall(FRAME.pack(len(text), size) + text)
    if payload is not None:
        channel.sendall(data_of(payload))


def load(path: Path, name: str) -> ModuleType:
    """Imports a file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dicts, lists and tuples, with a path such as `weights.layers.0.q`."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{index}")


def pools_of(kv_cache: Any) -> dict[str, Tensor]:
    """The keys and values of a cache by path, each (n_pages, n_kv, page_size, hd).

    A contiguous cache, (B, n_kv, max_seq, hd), counts as one page per sequence.
    """
    return {path: x for path, x in tensors_in(kv_cache, "kv_cache") if x.dim() == 4}


def slot_mask(kv_cache: Any, first: list[int], stop: list[int]) -> Tensor:
    """Which slots hold positions `first[b]` to `stop[b] - 1` of any sequence b.

    Returns (n_pages, page_size) bool, on the cache's device.
    """
    pool = next(iter(pools_of(kv_cache).values()))
    mask = torch.zeros(pool.shape[0], pool.shape[2], dtype=torch.bool, device=pool.device)
    for b, (start, end) in enumerate(zip(first, stop, strict=True)):
        pages, slots = slots_of(kv_cache, b, torch.arange(start, end, device=pool.device))
        mask[pages, slots] = True
    return mask


def slots_of(kv_cache: Any, b: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Page and slot of positions (n,), int64, of sequence b: two int64 tensors of shape (n,)."""
    if isinstance(kv_cache, dict):
        size = kv_cache["page_size"]
        return kv_cache["page_table"][b].long()[positions // size], positions % size
    return torch.full_like(positions, b), positions


def make_inputs(
    reference: ModuleType, scale: dict[str, Any], run: dict[str, Any], device: str
) -> tuple[Any, Any]:
    """Weights and KV cache of one run, the same in every process for the same arguments.

    Args:
        reference: the bundle's reference module.
        scale: of the bundle's spec.json.
        run: `weights_seed` and `cache_seed`, and `poison`: None, or what is NaN, `foreign_pages` or
            `unwritten_slots`.
        device: where to.
    """
    lens, max_seq = scale["prefill_lens"], scale["max_seq"]
    weights = reference.make_weights(scale["cfg"], run["weights_seed"], device)
    kv_cache = reference.make_kv_cache(
        scale["cfg"], scale["batch"], lens, max_seq, run["cache_seed"], device
    )
    if run["poison"] is not None:
        mask = poison_mask(kv_cache, scale, run["poison"])
        for pool in pools_of(kv_cache).values():
            pool.masked_fill_(mask[:, None, :, None], torch.nan)
    return weights, kv_cache


def poison_mask(kv_cache: Any, scale: dict[str, Any], what: str) -> Tensor:
    """The slots that `what`, see `make_inputs`, means: (n_pages, page_size) bool."""
    first = [0] * scale["batch"]
    owned = owned_pages(kv_cache, scale)[:, None]
    written = slot_mask(kv_cache, first, scale["prefill_lens"])
    return ~owned.expand_as(written) if what == "foreign_pages" else owned & ~written


def owned_pages(kv_cache: Any, scale: dict[str, Any]) -> Tensor:
    """Which pages belong to the sequences that are decoded: (n_pages,) bool."""
    batch = scale["batch"]
    return slot_mask(kv_cache, [0] * batch, [scale["max_seq"]] * batch).any(dim=1)


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor's storage, and the one past its end."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


# --- the process ----------------------------------------------------------------------------------


def receive(channel: socket.socket) -> dict[str, Any]:
    """The next command; ends the process when the grading process has gone."""
    frame = channel.recv(FRAME.size, socket.MSG_WAITALL)
    if len(frame) < FRAME.size:
        raise SystemExit(0)
    command: dict[str, Any] = json.loads(
        channel.recv(FRAME.unpack(frame)[0], socket.MSG_WAITALL).decode()
    )
    return command


class Session:
    """What lives between commands. Each public method is a command: JSON in, JSON and bytes out."""

    def __init__(self) -> None:
        self.device = "cpu"
        self.answer: Tensor | None = None

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        """Imports the reference and makes the stream that is current from here on."""
        self.device = command["device"]
        self.reference = load(Path(command["reference"]), "reference")
        if self.device == "cuda":
            # Work on the default stream would wait for a kernel on any blocking stream.
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)
            self.begin = torch.cuda.Event(enable_timing=True)
            self.end = torch.cuda.Event(enable_timing=True)
        return {}

    def solution(self, command: dict[str, Any]) -> dict[str, Any]:
        """Imports the solution, whose folder is importable."""
        path = Path(command["path"])
        sys.path.insert(0, str(path.parent))
        self.module = load(path, "solution")
        names = ("build_model", "decode_step", "teardown")
        return {name: callable(getattr(self.module, name, None)) for name in names}

    def inputs(self, command: dict[str, Any]) -> dict[str, Any]:
        """Makes weights, cache, and all memory that later commands need."""
        scale, self.run = command["scale"], command["run"]
        # A solution may have changed these for itself; the inputs do not depend on it.
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        self.cfg, self.max_seq = scale["cfg"], scale["max_seq"]
        self.weights, self.kv_cache = make_inputs(
            self.reference, scale | {"cfg": dict(self.cfg)}, self.run, self.device
        )
        self.tensors = dict(self.given())
        batch, steps = scale["batch"], scale["decode_steps"]
        # Every step has tensors of its own: a solution that keeps an old address reads old tokens.
        self.tokens = [self.ids(batch) for _ in range(steps)]
        self.positions = [self.ids(batch) for _ in range(steps)]
        shape = (batch, self.cfg["vocab"])
        self.kept = {
            name: torch.zeros(shape, dtype=dtype, device=self.device)
            for name, dtype in LOGITS_DTYPES.items()
        }
        for kept in self.kept.values():
            # Copies of every layout that logits may have load their kernels now.
            kept.copy_(torch.zeros(shape[0], 2 * shape[1] + 1, dtype=kept.dtype).to(kept)[:, 1::2])
            kept.copy_(torch.zeros(shape[::-1], dtype=kept.dtype).to(kept).t())
            kept.cpu()
        self.wait()
        return {}

    def ids(self, batch: int) -> Tensor:
        """A tensor of its own for (B,) tokens or positions."""
        return torch.zeros(batch, dtype=torch.int64, device=self.device)

    def given(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that the solution is handed, by path, as the dicts are now."""
        yield from tensors_in(self.weights, "weights")
        yield from tensors_in(self.kv_cache, "kv_cache")

    def build(self, _: dict[str, Any]) -> dict[str, Any]:
        """Calls `build_model`."""
        self.handle = self.module.build_model(self.weights, self.kv_cache, self.cfg, self.max_seq)
        self.wait()
        return {}

    def rehearse(self, command: dict[str, Any]) -> dict[str, Any]:
        """A step without a solution: what the grader itself costs."""
        return self.timed(command, lambda _tokens, _pos: self.kept["bfloat16"])

    def step(self, command: dict[str, Any]) -> dict[str, Any]:
        """Calls `decode_step` once."""
        return self.timed(
            command, lambda tokens, pos: self.module.decode_step(self.handle, tokens, pos)
        )

    def timed(self, command: dict[str, Any], call: Callable[[Tensor, Any], Any]) -> dict[str, Any]:
        """Runs one step and describes what it returned; times are microseconds."""
        tokens, pos = self.tokens[command["index"]], command["pos"]
        tokens.copy_(torch.tensor(command["tokens"]))
        if isinstance(pos, list):
            positions = self.positions[command["index"]]
            positions.copy_(torch.tensor(pos))
            pos = positions
        self.wait()
        start = perf_counter()
        if self.device == "cuda":
            self.begin.record(self.stream)
        result = call(tokens, pos)
        if self.device == "cuda":
            self.end.record(self.stream)
        elapsed = (perf_counter() - start) * 1e6
        # At once: work that the solution left on another stream has not been waited for.
        about = self.keep(result)
        self.wait()
        if self.device == "cuda":
            elapsed = self.begin.elapsed_time(self.end) * 1e3
        return about | {"us": elapsed}

    def keep(self, result: Any) -> dict[str, Any]:
        """Copies logits on the current stream, and describes them."""
        self.answer = None
        if type(result) is not Tensor:
            return {"type": type(result).__qualname__}
        dtype = str(result.dtype).removeprefix("torch.")
        kept = self.kept.get(dtype)
        if self.device == "cuda":
            torch.cuda.set_stream(self.stream)  # the solution may have left another
        if kept is not None and result.shape == kept.shape and result.device == kept.device:
            self.answer = kept.copy_(result.detach())
        return {
            "type": "Tensor",
            "dtype": dtype,
            "shape": list(result.shape),
            "device": result.device.type,
            "alias": self.alias_of(result),
        }

    def alias_of(self, result: Tensor) -> str | None:
        """The argument whose memory a tensor lies in; a buffer of the solution's own is no harm."""
        if result.layout != torch.strided:
            return None
        start, stop = memory_of(result)
        arguments = [*self.tensors.items(), *(("token_ids", x) for x in self.tokens)]
        arguments += [("pos", x) for x in self.positions]
        for path, tensor in arguments:
            begin, end = memory_of(tensor)
            if start < end and begin < stop:
                return path
        return None

    def logits(self, _: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The bytes of the last step's logits."""
        return {}, None if self.answer is None else self.answer.cpu()

    def state(self, _: dict[str, Any]) -> dict[str, Any]:
        """What cfg is now, and the paths at which the given dicts hold another tensor."""
        now = dict(self.given())
        paths = dict.fromkeys([*self.tensors, *now])
        replaced = [path for path in paths if now.get(path) is not self.tensors.get(path)]
        return {"cfg": json.loads(json.dumps(self.cfg, default=repr)), "replaced": replaced}

    def read(self, command: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """The bytes of one tensor that the solution was given."""
        return {}, self.tensors[command["path"]].detach().cpu().contiguous()

    def teardown(self, _: dict[str, Any]) -> dict[str, Any]:
        """Calls `teardown`."""
        self.module.teardown(self.handle)
        return {}

    def finish(self, _: dict[str, Any]) -> dict[str, Any]:
        """Drops the run's memory, after waiting for the device: for ever if a kernel runs on."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        del self.handle, self.weights, self.kv_cache, self.tensors, self.tokens, self.positions
        self.answer = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {}

    def wait(self) -> None:
        """Waits for the current stream."""
        if self.device == "cuda":
            self.stream.synchronize()


def serve(channel: socket.socket) -> None:
    """Answers commands until the channel closes."""
    session = Session()
    while True:
        command = receive(channel)
        payload: Tensor | None = None
        try:
            reply = getattr(session, command["do"])(command)
            if isinstance(reply, tuple):
                reply, payload = reply
        except BaseException as error:  # noqa: BLE001 - a solution may raise anything, SystemExit too
            trace = "".join(traceback.format_exception(error))
            reply = {"error": type(error).__qualname__, "message": str(error), "trace": trace}
        send(channel, reply, payload)


def main() -> None:
    """Serves the descriptor that the command line names."""
    # The grader's modules must not hide the solution's.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    # Orphans of the solution come to this process, so that the grader finds them.
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    serve(channel)


if __name__ == "__main__":
    main()
