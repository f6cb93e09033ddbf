# SPDX-License-Identifier: Apache-2.0
"""A spec as a bundle: a folder with everything that solving and grading the task takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mega_factory.grader.checks import APPEND_TOL
from mega_factory.grader.grading import IDLE_S, RUNS, TIME_LIMIT_S
from mega_factory.grader.plan import warm_up
from mega_factory.grading import GRADER_FILES
from mega_factory.spec import BANDWIDTHS, Figures, MegaSpec

PACKAGE = Path(__file__).parent

HEAD = """# {title}

{blurb}

`{name}` -- {keywords}

This folder is `/app`. Write `solution.py`; its template names the functions. `reference.py` says
what they must compute, and `python grade.py solution.py` grades them, without a GPU if you add
`--scale tiny --device cpu`.

{spec_md}

## Contract

{contract_md}

## Precision

{precision_md}

## Correctness

{correctness_md}

## Performance

{perf_md}

{regime_md}

## How it is run

{how_md}

## Figures

{figures_md}
"""

SOLUTION = '''"""A solution of {name}; see TASK.md."""


def build_model(weights, kv_cache, cfg, max_seq_len):
    """Prepares decoding; untimed. Returns a handle of any type.

    {arg_doc}
    cfg       : dict with the model's sizes
    max_seq_len : capacity of the cache per sequence, in tokens
    """
    raise NotImplementedError


def decode_step(handle, token_ids, pos):
    """Returns logits ({batch}, {vocab}), bf16 or fp32, of one token per sequence; timed.

    token_ids : ({batch},), int64
    pos       : {pos}
    """
    raise NotImplementedError


def teardown(handle):
    """Ends what `build_model` started, such as a persistent kernel; may be left out."""
'''


def spec_json(spec: MegaSpec) -> dict[str, Any]:
    """What grading needs of a spec, as the bundle's spec.json has it.

    `baselines` is null while nothing was measured; what verify measured goes before what the text
    claims, since the fixtures are the bundle's.
    """
    figures = spec.measured or spec.claims
    return {
        "name": spec.name,
        "hash": spec.hash(),
        "kind": spec.kind,
        "per_sequence_pos": spec.per_sequence_pos,
        "tol": spec.tol,
        "scales": {"full": asdict(spec.full()), "tiny": asdict(spec.tiny())},
        "baselines": figures
        and {
            "eager_us": figures.eager_us,
            "busy_us": figures.busy_us,
            "graph_us": figures.graph_us,
        },
        "floor_us": spec.perf_md.floor_us,
        "bandwidth": {"gpu": spec.gpu, "tb_s": BANDWIDTHS[spec.gpu]},
        "measured_on": figures and figures.measured_on,
        "unfused_kernels": figures and figures.kernels,
        "note": spec.note,
    }


def _rows(figures: Figures | None) -> dict[str, str]:
    """Figures as text, by what they are."""
    if figures is None:
        return {}
    graph = "capture fails" if figures.graph_us is None else f"{figures.graph_us:g} us"
    busy, agree = figures.busy_us, figures.paged_error
    return {
        "kernels per step of the reference": str(figures.kernels),
        "eager time of the reference": f"{figures.eager_us:g} us",
        "of that, GPU busy": "" if busy is None else f"{busy:g} us",
        "CUDA graph of the reference": graph,
        "paged against contiguous": "" if agree is None else f"{agree:g}",
        **{f"error of {name}": f"{error:.3g}" for name, error in figures.errors.items()},
        **{f"error of {name}": f"{error:.3g}" for name, error in figures.drops.items()},
    }


def figures_md(spec: MegaSpec) -> str:
    """Every measured figure with the place of its measurement, claims beside ours."""
    columns = {
        figures.measured_on: _rows(figures)
        for figures in (spec.claims, spec.measured)
        if figures is not None
    }
    if not columns:
        return f"None: {spec.note}."
    names = dict.fromkeys(name for rows in columns.values() for name in rows)
    lines = [f"| what | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines += [
        f"| {name} | {' | '.join(rows.get(name, '') for rows in columns.values())} |"
        for name in names
    ]
    text = "\n".join(lines)
    if spec.claims is None:
        return text
    if spec.measured is None:
        return f"{text}\n\nNot yet measured with the fixtures of this bundle."
    return (
        f"{text}\n\nThe texts state the first column; the fixtures of this bundle gave the second, "
        "which grades compare with."
    )


def how_md(spec: MegaSpec) -> str:
    """What the grader does with a solution, in the numbers that it does it with."""
    where, table = ("pools", "; the page table stays") if spec.kind == "paged" else ("caches", "")
    foreign = "the pages of other sequences, and " if spec.kind == "paged" else ""
    return f"""* Your file is imported in a process of its own; modules beside it can be imported.
* There are {RUNS} runs by default, each with new weights, cache and tokens: `build_model`, up to
  {spec.decode_steps} times `decode_step`, `teardown`. One of them ends early.
* `build_model` may so be called several times in one process: after `teardown`, or without if you
  have none. If then the GPU is not idle after {IDLE_S:g} s, the next run gets a new process.
* **The cache is the state.** Between two steps its contents may be changed by others, as by an
  engine that swaps pages' contents: in every run, before a step that you cannot foresee, all tokens
  that the cache came with are replaced in place{table}.
  Read keys and values from the {where} in every step: a copy of your own is out of date.
* The memory that you were given is compared after a step that you cannot foresee, after the last,
  and after `teardown`. K and V of a position may differ from the reference's by a relative error of
  {APPEND_TOL * spec.tol:g}, over the KV heads of a layer.
* Half of what you must not read holds NaN, half random numbers:
  {foreign}slots past `pos`.
* The current stream, in all three functions, is neither the default stream nor blocking: work on
  the default stream is not ordered with it. A kernel that `build_model` launches may run on.
* No process that you started may be alive when `build_model` or `decode_step` returns, and
  `decode_step` may start none, nor ignore SIGCHLD: compile in `build_model`.
* In one process your file's import and all calls together may take {TIME_LIMIT_S:g} s.
* A step's time is the larger of that between two events around the call, and that from the request
  to the answer in the grading process, less what both take without a solution. The first
  {warm_up(spec.decode_steps)} steps of each run do not count."""


def task_md(spec: MegaSpec) -> str:
    """The text of the task."""
    texts = {name: getattr(spec, name) for name in ("title", "blurb", "name", "regime_md")}
    return HEAD.format(
        **texts,
        keywords=", ".join(spec.keywords),
        spec_md=spec.spec_md,
        contract_md=spec.contract_md,
        precision_md=spec.precision_md,
        correctness_md=spec.correctness_md,
        perf_md=spec.perf_md.text,
        how_md=how_md(spec),
        figures_md=figures_md(spec),
    )


def render(spec: MegaSpec) -> dict[str, str]:
    """The text of each file of the bundle, by its path in the folder."""
    pos = "(B,), int64" if spec.per_sequence_pos else "int"
    files = {
        "TASK.md": task_md(spec),
        "reference.py": spec.model_src,
        "solution.py": SOLUTION.format(
            name=spec.name,
            arg_doc=spec.arg_doc,
            batch=spec.batch,
            vocab=spec.cfg["vocab"],
            pos=f"{pos}, the position that this step writes",
        ),
        "spec.json": json.dumps(spec_json(spec), indent=2) + "\n",
    }
    for name, source in GRADER_FILES.items():
        files[name] = (PACKAGE / source).read_text("utf-8")
    return files


def write(spec: MegaSpec, folder: Path) -> Path:
    """Writes the bundle to `folder/<name>` and returns that."""
    bundle = folder / spec.name
    for name, text in render(spec).items():
        path = bundle / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return bundle


def drift(spec: MegaSpec, folder: Path) -> Iterator[str]:
    """A sentence for each way in which `folder/<name>` is not what the spec renders."""
    bundle = folder / spec.name
    if not bundle.is_dir():
        yield f"{spec.name}: missing"
        return
    try:
        found = json.loads((bundle / "spec.json").read_text("utf-8"))["hash"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found is not None and found != spec.hash():
        yield f"{spec.name}: stale: rendered from {found}, the spec is now {spec.hash()}"
        return
    files = render(spec)
    for name, text in files.items():
        path = bundle / name
        if not path.is_file():
            yield f"{spec.name}: {name}: missing"
        elif path.read_bytes() != text.encode():
            yield f"{spec.name}: {name}: edited, or rendered by another version of the factory"
    for path in sorted(bundle.rglob("*")):
        name = path.relative_to(bundle).as_posix()
        if path.is_file() and name not in files and "__pycache__" not in path.parts:
            yield f"{spec.name}: {name}: not of the bundle"


def orphans(names: Iterable[str], folder: Path) -> Iterator[str]:
    """A sentence for each bundle in a folder that is of none of the tasks."""
    known = set(names)
    for path in sorted(folder.glob("*/spec.json")):
        if path.parent.name not in known:
            yield f"{path.parent.name}: of no task"
