# SPDX-License-Identifier: Apache-2.0
"""A task as data: model, fixture, tolerance, figures and texts."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

Cfg = dict[str, Any]
Kind = Literal["paged", "contiguous"]

# Datasheet rates in TB/s, by the folder of `measured` that holds that GPU's measurements.
BANDWIDTHS = {"h200": 4.8}
MEASURED = Path(__file__).parent / "measured"

# Names in `twins.DROPS` of features that every task of a kind has.
DROPPED: dict[Kind, list[str]] = {
    "paged": ["never_append", "ignore_table"],
    "contiguous": ["never_append"],
}
# Seeds of weights, cache and tokens that `verify` runs for every error.
VERIFY_SEEDS = 2
UNMEASURED = "not yet measured"

# Values of cfg at tiny scale; the ratio of query to KV heads is that of the full one.
TINY: Cfg = {"layers": 2, "d": 64, "ffn": 128, "n_kv": 2, "hd": 16, "vocab": 256}
TINY_PAGE_SIZE = 8
TINY_PREFILL = 29
TINY_STEPS = 8


class SpecError(ValueError):
    """A spec that contradicts itself; `violations` are the sentences of its message."""

    def __init__(self, name: str, violations: list[str]) -> None:
        super().__init__("\n  ".join([f"{name}:", *violations]))
        self.violations = violations


@dataclass(frozen=True)
class Figures:
    """What was measured of a task at full scale, and where.

    Attributes:
        measured_on: where, such as the name of a GPU.
        kernels: that the reference launches per step.
        eager_us: microseconds of a step of the reference.
        busy_us: the part of it in which the GPU is busy; None if a claim does not say.
        graph_us: microseconds of its CUDA graph; None if it cannot be captured.
        errors: worst relative error of each independent implementation, by the names of
            `twins.CORRECT`.
        drops: the same of implementations that lack a feature, by the names of `twins.DROPS`.
        paged_error: relative error between the paged and the contiguous reference; None if a
            claim does not say.
        steps: in a row, of each implementation; 0 if a claim does not say.
        seeds: of weights, cache and tokens; 0 if a claim does not say.
    """

    measured_on: str
    kernels: int
    eager_us: float
    busy_us: float | None
    graph_us: float | None
    errors: dict[str, float]
    drops: dict[str, float]
    paged_error: float | None
    steps: int
    seeds: int

    @property
    def floor(self) -> float:
        """The worst error of a correct implementation; 0 if there is none."""
        return max(self.errors.values(), default=0.0)

    @classmethod
    def load(cls, name: str, place: str = "h200") -> Figures | None:
        """What `verify` measured of the task `name` at `place`; None if it has not run there.

        Raises:
            ValueError: the file is of another task or scale.
        """
        path = MEASURED / place / f"{name}.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text("utf-8"))
        if found["spec"] != name or found["scale"] != "full":
            raise ValueError(
                f"{path}: expected {name} at full scale, got {found['spec']} at {found['scale']}"
            )
        return cls(**{field.name: found[field.name] for field in fields(cls)})


def us(value: float | None) -> str:
    """Microseconds as a table has them."""
    return UNMEASURED if value is None else f"{value:g}"


@dataclass(frozen=True)
class Traffic:
    """What a step must read.

    Attributes:
        cfg: of the model.
        tokens: that all caches hold together when the last step has appended its own.
        gpu: a key of BANDWIDTHS.
    """

    cfg: Cfg
    tokens: int
    gpu: str = "h200"

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights: all but the embedding of an untied model."""
        cfg: dict[str, int] = self.cfg
        d, n_q, n_kv = cfg["d"], cfg["n_q"] * cfg["hd"], cfg["n_kv"] * cfg["hd"]
        layer = 2 * d + 2 * d * n_q + 2 * d * n_kv + 3 * d * cfg["ffn"]
        return 2 * (cfg["layers"] * layer + d + cfg["vocab"] * d)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        cfg: dict[str, int] = self.cfg
        return 4 * cfg["layers"] * cfg["n_kv"] * cfg["hd"] * self.tokens

    @property
    def floor_us(self) -> float:
        """Microseconds of both at the datasheet rate."""
        return (self.weight_bytes + self.kv_bytes) / BANDWIDTHS[self.gpu] / 1e6

    @property
    def weights(self) -> str:
        """Of the weights, as texts state it."""
        return f"{self.weight_bytes / 1e9:.3g} GB"

    @property
    def kv(self) -> str:
        """Of keys and values, as texts state it."""
        return f"{self.kv_bytes / 1e6:.0f} MB"

    @property
    def kv_percent(self) -> int:
        """Share of keys and values."""
        return round(100 * self.kv_bytes / (self.weight_bytes + self.kv_bytes))


@dataclass(frozen=True, kw_only=True)
class Perf:
    """The performance section of a task.

    Attributes:
        floor_us: microseconds of the step's traffic at the datasheet rate.
        eager_us: of a step of the reference; None while unmeasured.
        graph_us: of the same without launch overhead; None while unmeasured.
        graph_label: how `graph_us` was taken.
        bar: short for it, in a sentence.
        lead: first paragraph: the traffic.
        extra: advice, a Markdown list.
    """

    floor_us: float
    eager_us: float | None
    graph_us: float | None
    graph_label: str
    bar: str
    lead: str
    extra: str

    @property
    def text(self) -> str:
        """The section in Markdown, its table always that of the figures."""
        rows = [
            (f"the traffic at {BANDWIDTHS['h200']} TB/s, the datasheet rate", self.floor_us),
            ("eager torch, the reference", self.eager_us),
            (self.graph_label, self.graph_us),
        ]
        lines = [
            f"| {label} | {us(value)} |"
            f" {UNMEASURED if value is None else f'{value / self.floor_us:.1f}'} |"
            for label, value in rows
        ]
        table = "\n".join(["| what | us per step | times the floor |", "|---|---:|---:|", *lines])
        return (
            f"{self.lead}\n\n{table}\n\n"
            f"The median step counts, of those after each run's warm-up. The bar is the {self.bar}"
            " time: a faster step has saved\ntraffic or waiting, not only launches."
            f"\n\n{self.extra.strip()}"
        )


@dataclass(frozen=True)
class Scale:
    """The size at which a task is graded or verified.

    Attributes:
        cfg: of the model.
        batch: sequences.
        prefill_lens: tokens that the cache holds of each before the first step.
        max_seq: capacity of the cache per sequence, in tokens.
        decode_steps: steps of one run.
        tol: the largest relative error of logits that passes.
    """

    cfg: Cfg
    batch: int
    prefill_lens: list[int]
    max_seq: int
    decode_steps: int
    tol: float


@dataclass(frozen=True, kw_only=True)
class MegaSpec:
    """One task: write `build_model` and `decode_step` for this model, cache and context.

    Attributes:
        name: with hyphens; with underscores it is that of the module in `specs`.
        unfused_kernels: that the reference launches per step; None while unmeasured.
        title: heading of the task.
        blurb: one paragraph.
        keywords: of the task.
        cfg: `layers, d, ffn, n_q, n_kv, hd, vocab, eps, theta, wdtype`, with `page_size` for a
            paged cache, with `tied` false for a model that has an LM head of its own.
        model_src: text of the reference.
        batch: sequences.
        prefill_len: tokens that the cache holds before the first step, the most of any sequence.
        prefill_lens: of each sequence, if they differ; `pos` is then a tensor (B,).
        max_seq: capacity of the cache per sequence, in tokens.
        decode_steps: steps of one run.
        tol: the largest relative error of logits that passes.
        drops: names in `twins.DROPS` that the tolerance must tell from correct; None for those of
            DROPPED.
        arg_doc: arguments of `build_model`, as in the docstring of the solution's template.
        spec_md: what is computed, in Markdown; so are the other texts.
        contract_md: a table of the arguments, the result, what may be written.
        precision_md: where results are rounded, and where the tolerance comes from.
        correctness_md: what is checked.
        perf_md: floor, baselines and advice.
        regime_md: sizes in one paragraph.
        gpu: that figures, floor and baselines are for, a key of BANDWIDTHS.
        claimed: figures that the texts state; None if they state those of `measured` or, without
            these, if `claims.stated` reads them from the fields and texts.
        measured: figures that `verify` measured; None while it has not run.
        cpu: figures that `verify` measured on a CPU: only their errors say something of the task.
    """

    name: str
    unfused_kernels: int | None
    title: str
    blurb: str
    keywords: list[str]
    cfg: Cfg
    model_src: str
    batch: int
    prefill_len: int
    max_seq: int
    decode_steps: int
    tol: float
    arg_doc: str
    spec_md: str
    contract_md: str
    precision_md: str
    correctness_md: str
    perf_md: Perf
    regime_md: str
    drops: list[str] | None = None
    measured: Figures | None = None
    cpu: Figures | None = None
    claimed: Figures | None = None
    prefill_lens: list[int] | None = None
    gpu: str = "h200"

    @property
    def kind(self) -> Kind:
        """How the KV cache is stored."""
        return "paged" if "page_size" in self.cfg else "contiguous"

    @property
    def per_sequence_pos(self) -> bool:
        """Whether `pos` is an int64 tensor (B,) on the device, not an int."""
        return self.prefill_lens is not None

    @property
    def lens(self) -> list[int]:
        """Tokens that the cache holds of each sequence before the first step."""
        return self.prefill_lens or [self.prefill_len] * self.batch

    @property
    def dropped(self) -> list[str]:
        """Names in `twins.DROPS` that the tolerance must tell from correct."""
        return DROPPED[self.kind] if self.drops is None else self.drops

    @property
    def claims(self) -> Figures | None:
        """Figures that the texts state and nothing here measured; None if there are none."""
        from mega_factory.claims import stated

        return self.claimed or (stated(self) if self.measured is None else None)

    @property
    def figures(self) -> Figures | None:
        """The figures that the texts state."""
        return self.claims or self.measured

    @property
    def pages_per_seq(self) -> int:
        """Pages that a sequence owns per layer; half of the pool is owned."""
        page_size: int = self.cfg["page_size"]
        return math.ceil(self.max_seq / page_size)

    @property
    def traffic(self) -> Traffic:
        """What the last step must read."""
        return Traffic(self.cfg, sum(self.lens) + self.batch * self.decode_steps, self.gpu)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step must read."""
        return self.traffic.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the last step must read."""
        return self.traffic.kv_bytes

    @property
    def floor_us(self) -> float:
        """Microseconds of that traffic at the datasheet rate."""
        return self.traffic.floor_us

    @property
    def note(self) -> str | None:
        """What the tolerance lacks; None if it was measured on a GPU, or is claimed."""
        if self.figures is not None:
            return None
        if self.cpu is None:
            return "the tolerance is not yet backed by any measurement"
        return (
            f"the tolerance is not yet measured on a GPU: correct implementations err by up to"
            f" {self.cpu.floor:g} on a CPU"
        )

    def full(self) -> Scale:
        """The size that the texts describe."""
        return Scale(self.cfg, self.batch, self.lens, self.max_seq, self.decode_steps, self.tol)

    def tiny(self) -> Scale:
        """The same task for a CPU in seconds: appends cross a page boundary, lengths differ."""
        cfg = self.cfg | TINY
        cfg["n_q"] = TINY["n_kv"] * (self.cfg["n_q"] // self.cfg["n_kv"])
        if self.kind == "paged":
            cfg["page_size"] = TINY_PAGE_SIZE
        lens = [max(1, TINY_PREFILL * n // max(self.lens)) for n in self.lens]
        pages = math.ceil((max(lens) + TINY_STEPS) / TINY_PAGE_SIZE) + 1
        return Scale(cfg, self.batch, lens, pages * TINY_PAGE_SIZE, TINY_STEPS, self.tol)

    def hash(self) -> str:
        """Of every field: what a bundle was rendered from."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def validate(self) -> MegaSpec:
        """The spec itself.

        Raises:
            SpecError: it contradicts itself; the message lists every violation.
        """
        from mega_factory.validation import violations

        if found := violations(self):
            raise SpecError(self.name, found)
        return self
