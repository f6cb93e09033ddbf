# SPDX-License-Identifier: Apache-2.0
"""Measures what a spec claims, with the fixtures that its bundle grades on."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from kernelkit.results import Environment
from mega_factory.models import contiguous, paged
from mega_factory.spec import VERIFY_SEEDS, MegaSpec, Scale
from mega_factory.twins import CORRECT, Twin, relative_error

MODELS: dict[str, Any] = {"paged": paged, "contiguous": contiguous}
# Page size at which a contiguous task's tokens are paged to compare the two.
PAGE_SIZE = 128
TIMED_STEPS = 12
WARM_UP = 4
PROFILED_STEPS = 2

NO_GRAPH = "not applicable on cpu"


def clone(kv_cache: Any) -> Any:
    """A cache with pools of its own: every implementation appends to the same positions."""
    if isinstance(kv_cache, dict):
        pools = {name: [pool.clone() for pool in kv_cache[name]] for name in "kv"}
        return kv_cache | pools
    return [(k.clone(), v.clone()) for k, v in kv_cache]


class Fixture:
    """Weights, cache and tokens of one seed at one scale."""

    def __init__(self, spec: MegaSpec, scale: Scale, seed: int, device: str, kind: str) -> None:
        self.scale, self.device = scale, device
        self.cfg = scale.cfg if kind == "contiguous" else {"page_size": PAGE_SIZE} | scale.cfg
        self.model = MODELS[kind]
        self.per_sequence = spec.per_sequence_pos
        self.weights = self.model.make_weights(self.cfg, seed, device)
        self.kv_cache = self.model.make_kv_cache(
            self.cfg, scale.batch, scale.prefill_lens, scale.max_seq, seed, device
        )
        generator = torch.Generator().manual_seed(seed)
        shape = (scale.decode_steps, scale.batch)
        self.tokens = torch.randint(self.cfg["vocab"], shape, generator=generator).to(device)
        self.lens = torch.tensor(scale.prefill_lens, device=device)

    def position(self, step: int) -> int | torch.Tensor:
        """What decode_step gets as `pos`."""
        return self.lens + step if self.per_sequence else self.scale.prefill_lens[0] + step

    def reference(self) -> Callable[[int], torch.Tensor]:
        """The reference as a function of the step's number, on a cache of its own."""
        handle = self.model.build_model(
            self.weights, clone(self.kv_cache), self.cfg, self.scale.max_seq
        )
        return lambda step: self.model.decode_step(handle, self.tokens[step], self.position(step))

    def twin(self, *, full: bool, drop: str | None = None) -> Callable[[int], torch.Tensor]:
        """An implementation of `twins` likewise."""
        twin = Twin(self.weights, clone(self.kv_cache), self.cfg, full, drop)
        return lambda step: twin.decode_step(self.tokens[step], self.lens + step)


def worst_error(step: Callable[[int], torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of consecutive steps."""
    return max(relative_error(step(number), logits) for number, logits in enumerate(expected))


def errors_of(fixture: Fixture, drops: list[str]) -> dict[str, float]:
    """The worst relative error of each implementation, correct and not, in all of a run's steps."""
    reference = fixture.reference()
    expected = [reference(number) for number in range(fixture.scale.decode_steps)]
    found = {name: worst_error(fixture.twin(full=name == "all_fp32"), expected) for name in CORRECT}
    for drop in drops:
        found[drop] = worst_error(fixture.twin(full=False, drop=drop), expected)
    return found


def paged_error(spec: MegaSpec, scale: Scale, device: str) -> float:
    """Relative error between the paged and the contiguous reference of one seed."""
    logits = []
    for kind in MODELS:
        reference = Fixture(spec, scale, 0, device, kind).reference()
        logits.append([reference(number) for number in range(scale.decode_steps)])
    return max(relative_error(*pair) for pair in zip(*logits, strict=True))


def synchronize(device: str) -> None:
    """Waits for the GPU, if it is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def eager_us(step: Callable[[int], torch.Tensor], device: str) -> float:
    """Median microseconds of a step on the host's clock, the GPU idle before and after."""
    times = []
    for number in range(WARM_UP + TIMED_STEPS):
        synchronize(device)
        begin = time.perf_counter()
        step(number % WARM_UP)
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[WARM_UP:])


def read_us(count: int, device: str) -> float:
    """Median microseconds in which torch reads and adds as many bytes, a multiple of 8."""
    x = torch.zeros(count // 8, dtype=torch.int64, device=device)
    return eager_us(lambda _number: x.sum(), device)


def trace(step: Callable[[int], torch.Tensor], device: str) -> list[Any]:
    """The profiler's events of `PROFILED_STEPS` steps."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for number in range(PROFILED_STEPS):
            step(number)
        synchronize(device)
    return list(profiler.events() or [])


def profile(step: Callable[[int], torch.Tensor], device: str) -> tuple[int, float]:
    """Kernels per step and microseconds in which the GPU is busy; on a CPU, top-level operators."""
    trace(step, device)  # the profiler itself is slow the first time
    events = trace(step, device)
    if device == "cpu":
        counted = [event for event in events if event.cpu_parent is None]
        busy = counted
    else:
        busy = [event for event in events if event.device_type.name == "CUDA"]
        counted = [event for event in busy if not event.name.startswith(("Memcpy", "Memset"))]
    spent = sum(event.time_range.elapsed_us() for event in busy)
    return round(len(counted) / PROFILED_STEPS), spent / PROFILED_STEPS


def graph_us(step: Callable[[int], torch.Tensor], device: str) -> tuple[float | None, str | None]:
    """Median microseconds of a replay of a step, or None and why it cannot be captured."""
    if device == "cpu":
        return None, NO_GRAPH
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step(0)
    except RuntimeError as error:
        return None, str(error).splitlines()[0]

    def replay(_number: int) -> torch.Tensor:
        graph.replay()
        return torch.empty(0)

    return eager_us(replay, device), None


def environment(device: str) -> Environment:
    """Where it runs."""
    if device == "cuda":
        return Environment.current()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Environment("cpu", torch.__version__, str(torch.version.cuda), "none", date)


def rounded(errors: dict[str, float]) -> dict[str, float]:
    """Three digits: as many as the texts state, and two runs agree on."""
    return {name: float(f"{error:.3g}") for name, error in errors.items()}


@torch.no_grad()
def measure(
    spec: MegaSpec, scale_name: str, device: str, steps: int | None = None
) -> dict[str, Any]:
    """What a file of `measured` holds: a spec.Figures, its environment, and how it was measured.

    Args:
        spec: the task.
        scale_name: `full` or `tiny`.
        device: `cpu` or `cuda`.
        steps: in a row, `WARM_UP` or more; by default the task's.

    Raises:
        ValueError: too few or too many steps; no GPU for `cuda`.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected a GPU for cuda, got a torch that sees none")
    scale = spec.full() if scale_name == "full" else spec.tiny()
    if steps is not None:
        if not WARM_UP <= steps <= scale.decode_steps:
            raise ValueError(f"steps: expected {WARM_UP} to {scale.decode_steps}, got {steps}")
        scale = dataclasses.replace(scale, decode_steps=steps)
    errors = [
        errors_of(Fixture(spec, scale, seed, device, spec.kind), spec.dropped)
        for seed in range(VERIFY_SEEDS)
    ]
    worst = {name: max(found[name] for found in errors) for name in errors[0]}
    step = Fixture(spec, scale, 0, device, spec.kind).reference()
    eager = eager_us(step, device)
    kernels, busy = profile(step, device)
    equal = paged_error(spec, scale, device)
    floor = reading = None
    if scale_name == "full":
        floor = round(spec.floor_us, 1)
        # What the floor is like on this machine.
        reading = round(read_us(spec.weight_bytes + spec.kv_bytes, device), 1)
    where = environment(device)
    # Last: a capture that fails may leave the GPU's context unusable.
    graph, reason = graph_us(step, device)
    return {
        "spec": spec.name,
        "scale": scale_name,
        "measured_on": where.gpu,
        "kernels": kernels,
        "eager_us": round(eager, 1),
        "busy_us": round(busy, 1),
        "graph_us": None if graph is None else round(graph, 1),
        "graph_error": reason,
        "errors": rounded({name: worst[name] for name in CORRECT}),
        "drops": rounded({name: worst[name] for name in spec.dropped}),
        "paged_error": equal,
        "floor_us": floor,
        "read_us": reading,
        "steps": scale.decode_steps,
        "seeds": VERIFY_SEEDS,
        "environment": asdict(where),
    }


def comparison(spec: MegaSpec, measured: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What the texts state, at full scale, beside what was measured: name, claim, measurement."""
    yield "what", "claimed, full scale", f"measured, {measured['scale']} scale"
    claimed: dict[str, Any] = {} if spec.figures is None else asdict(spec.figures)
    claimed |= {"floor_us": spec.perf_md.floor_us}
    for name in (
        "measured_on", "kernels", "eager_us", "busy_us", "graph_us", "floor_us", "read_us",
        "paged_error", "steps",
    ):  # fmt: skip
        value = measured[name]
        if name == "graph_us" and value is None:
            value = f"none: {measured['graph_error']}"
        yield name, str(claimed.get(name, "-")), str(value)
    for group in ("errors", "drops"):
        for name, error in measured[group].items():
            yield f"error of {name}", str(claimed.get(group, {}).get(name, "-")), str(error)
    yield "tol", str(spec.tol), ""
