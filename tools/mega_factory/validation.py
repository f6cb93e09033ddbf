# SPDX-License-Identifier: Apache-2.0
"""What a spec must satisfy: its sizes and figures, and that its texts state these."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

from mega_factory import contract
from mega_factory.claims import NUMBER, table_of
from mega_factory.mistyped import fits, mistyped
from mega_factory.spec import BANDWIDTHS, TINY_STEPS, Figures, MegaSpec
from mega_factory.twins import CORRECT, DROPS

Check = Callable[[MegaSpec], Iterator[str]]

# What shapes, traffic and pages are computed from.
SIZES = {"cfg", "batch", "prefill_len", "prefill_lens", "max_seq", "decode_steps"}
CFG_COUNTS = ("layers", "d", "ffn", "n_q", "n_kv", "hd", "vocab")
CFG_KEYS = {*CFG_COUNTS, "eps", "theta", "wdtype"}
CFG_OPTIONAL = {"page_size", "tied"}
TEXTS = (
    "title", "blurb", "arg_doc", "spec_md", "contract_md", "precision_md", "correctness_md",
    "regime_md",
)  # fmt: skip
FUNCTIONS = ("make_weights", "make_kv_cache", "build_model", "decode_step")

# The tolerance over the error of the worst correct implementation: less fails honest solutions on
# other tokens, more tests little. And the error of the closest wrong one over the tolerance.
FLOOR_MARGIN = (2, 4)
DROP_MARGIN = 1.5


def violations(spec: MegaSpec) -> list[str]:
    """What is wrong with a spec, a sentence each: field, what was expected and what came."""
    wrong = dict(_unusable(spec))
    return [
        *wrong.values(),
        *(text for read, check in _checks(spec, set(wrong)) if not read & wrong.keys()
          for text in check(spec)),
    ]  # fmt: skip


def _unusable(spec: MegaSpec) -> Iterator[tuple[str, str]]:
    """Field and violation where no check that reads the field can run."""
    yield from mistyped(spec)
    if fits(spec.tol, float) and spec.tol <= 0:
        yield "tol", f"tol: expected a positive number, got {spec.tol}"


def _checks(spec: MegaSpec, wrong: set[str]) -> list[tuple[set[str], Check]]:
    """Each check that applies, with the fields that it reads and does not test itself."""
    figures = {"cfg", "tol", "drops", "claimed", "measured", "cpu"}
    if spec.claimed is None and spec.measured is None:
        figures |= {"unfused_kernels", "perf_md", "precision_md"}
    checks: list[tuple[set[str], Check]] = [
        ({"name"}, _name), ({"keywords"}, _keywords), ({"gpu"}, _gpu), ({"cfg", "drops"}, _drops),
        ({"cfg"}, _cfg), (set(), _counts), ({"batch", "prefill_len", "prefill_lens"}, _ragged),
        ({"prefill_len", "decode_steps", "max_seq"}, _room), (set(), _empty),
        ({"cfg", "model_src"}, _model), ({"cfg", "arg_doc"}, contract.in_template),
    ]  # fmt: skip
    if not SIZES & wrong and _is_sized(spec):
        checks += [({"spec_md"}, _pages), ({"contract_md"}, contract.violations)]
        if "gpu" not in wrong and spec.gpu in BANDWIDTHS:
            checks += [
                ({"regime_md"}, _regime), ({"perf_md"}, _floor), (figures | {"perf_md"}, _stated),
                (figures | {"perf_md", "unfused_kernels"}, _figures),
            ]  # fmt: skip
    return [
        *checks, ({"tol", "correctness_md"}, _gate), ({"tol", "precision_md"}, _tol),
        (figures | {"precision_md"}, _errors), (figures, _sources),
    ]  # fmt: skip


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_sized(spec: MegaSpec) -> bool:
    """Whether shapes, traffic and pages can be computed."""
    counts = [spec.cfg.get(key) for key in CFG_COUNTS]
    counts += [spec.cfg.get("page_size", 1), spec.batch, spec.prefill_len, spec.max_seq]
    return all(map(_is_count, counts))


def _expect(field: str, expected: object, got: object) -> Iterator[str]:
    if expected != got:
        yield f"{field}: expected {expected}, got {got}"


def _name(spec: MegaSpec) -> Iterator[str]:
    if not re.fullmatch(r"megakernel(-[a-z0-9]+)+", spec.name):
        yield f"name: expected megakernel-..., of lower case, digits and hyphens, got {spec.name!r}"


def _keywords(spec: MegaSpec) -> Iterator[str]:
    if "megakernel" not in spec.keywords or len(set(spec.keywords)) < len(spec.keywords):
        yield f"keywords: expected megakernel among them, each once, got {spec.keywords}"


def _gpu(spec: MegaSpec) -> Iterator[str]:
    if spec.gpu not in BANDWIDTHS:
        yield f"gpu: expected one of {', '.join(BANDWIDTHS)}, got {spec.gpu}"


def _drops(spec: MegaSpec) -> Iterator[str]:
    if unknown := set(spec.dropped) - set(DROPS):
        yield f"drops: expected names of {', '.join(DROPS)}, got {', '.join(sorted(unknown))}"
    if not spec.dropped:
        yield "drops: expected at least one, got none"


def _cfg(spec: MegaSpec) -> Iterator[str]:
    cfg = spec.cfg
    if missing := CFG_KEYS - set(cfg):
        yield f"cfg: expected also {', '.join(sorted(missing))}"
    if unknown := set(cfg) - CFG_KEYS - CFG_OPTIONAL:
        yield f"cfg: expected nothing besides the document's keys, got {', '.join(sorted(unknown))}"
    counts = {key: cfg[key] for key in (*CFG_COUNTS, "page_size") if key in cfg}
    valid = {key: value for key, value in counts.items() if _is_count(value)}
    for key, value in counts.items():
        if key not in valid:
            yield f"cfg[{key!r}]: expected a positive int, got {value!r}"
    n_q, n_kv, hd = map(valid.get, ("n_q", "n_kv", "hd"))
    if n_q and n_kv and n_q % n_kv:
        yield f"cfg['n_q']: expected a multiple of n_kv = {n_kv}, got {n_q}"
    if hd and hd % 2:
        yield f"cfg['hd']: expected an even number, rotated by pairs, got {hd}"
    if "wdtype" in cfg:
        yield from _expect("cfg['wdtype']", "bf16", cfg["wdtype"])
    for key in ("eps", "theta"):
        if key in cfg and not (fits(cfg[key], float) and cfg[key] > 0):
            yield f"cfg[{key!r}]: expected a positive number, got {cfg[key]!r}"
    if "tied" in cfg and not isinstance(cfg["tied"], bool):
        yield f"cfg['tied']: expected a bool, got {cfg['tied']!r}"


def _counts(spec: MegaSpec) -> Iterator[str]:
    counts = {"batch": spec.batch, "prefill_len": spec.prefill_len, "max_seq": spec.max_seq}
    for field, value in counts.items():
        if fits(value, int) and value < 1:
            yield f"{field}: expected a positive int, got {value}"
    if fits(spec.decode_steps, int) and spec.decode_steps < TINY_STEPS:
        yield f"decode_steps: expected at least {TINY_STEPS}, got {spec.decode_steps}"


def _ragged(spec: MegaSpec) -> Iterator[str]:
    if spec.prefill_lens is not None:
        lens = spec.prefill_lens
        most = max(lens, default=0)
        yield from _expect("prefill_lens: their number", spec.batch, len(lens))
        yield from _expect("prefill_len: the most of prefill_lens", most, spec.prefill_len)
        if min(lens, default=1) < 1:
            yield f"prefill_lens: expected positive ints, got {lens}"
        if len(set(lens)) == 1:
            yield "prefill_lens: expected different lengths, or none: prefill_len serves equal ones"


def _room(spec: MegaSpec) -> Iterator[str]:
    if spec.prefill_len + spec.decode_steps > spec.max_seq:
        yield (
            f"max_seq: expected at least prefill_len + decode_steps ="
            f" {spec.prefill_len + spec.decode_steps}, got {spec.max_seq}"
        )


def _empty(spec: MegaSpec) -> Iterator[str]:
    for field in TEXTS:
        text = getattr(spec, field)
        if fits(text, str) and not text.strip():
            yield f"{field}: expected a text, got an empty one"


def _missing(field: str, text: str, wanted: Iterable[str]) -> Iterator[str]:
    """A violation for each phrase that a text lacks, wherever its lines break."""
    words = " ".join(text.split())
    for phrase in wanted:
        if not re.search(rf"(?<![\w.]){re.escape(phrase)}(?![\w]|\.\d)", words):
            yield f"{field}: expected it to state {phrase!r}"


def _statements(spec: MegaSpec) -> dict[str, set[float]]:
    """What may stand for the number in each phrase, in whichever text it occurs."""
    cfg, lens, traffic = spec.cfg, spec.lens, spec.traffic
    layers, head = cfg["layers"], 2 * cfg["vocab"] * cfg["d"]
    mb_of_layer = (traffic.weight_bytes - head) / layers / 1e6
    kv_mb = traffic.kv_bytes / 1e6
    wanted: dict[str, set[float]] = {
        r"NUMBER GB": {float(f"{traffic.weight_bytes / 1e9:.3g}")},
        r"(?<!weights are )NUMBER MB(?! of pure copy)": {round(kv_mb)},
        r"NUMBER MB of pure copy per layer": {math.floor(kv_mb / layers)},
        r"layer's weights are NUMBER MB": {round(mb_of_layer)},
        r"NUMBER% of (?:your|the) bytes": {traffic.kv_percent},
        r"[Bb]atch NUMBER": {spec.batch},
        r"[Pp]refill NUMBER": {spec.prefill_len},
        r"decode NUMBER more": {spec.decode_steps},
        r"NUMBER layers": {layers},
        r"repeated NUMBER times": {layers},
        r"holding NUMBER tokens": {spec.prefill_len},
        r"and NUMBER tokens of each": {spec.prefill_len},
        r"pos = NUMBER": {spec.prefill_len},
        r"from NUMBER to": {min(lens)},
        r"NUMBER tokens long": {max(lens), max(lens) + spec.decode_steps},
        r"NUMBER keys of": {spec.prefill_len + 1},
        r"floor near NUMBER": {round(traffic.floor_us)},
        r"NUMBER columns": {spec.batch},
    }
    if spec.kind == "paged":
        size, pages = cfg["page_size"], spec.batch * spec.pages_per_seq
        read = math.ceil((spec.prefill_len + spec.decode_steps) / size)
        wanted |= {
            r"NUMBER-token": {size},
            r"pages of NUMBER tokens": {size},
            r"NUMBER-page": {2 * pages},
            r"holds NUMBER pages": {2 * pages},
            r"owns NUMBER": {pages},
            r"other NUMBER hold": {pages},
            r"NUMBER per sequence": {spec.pages_per_seq},
            r"over NUMBER pages": {math.ceil(spec.prefill_len / size)},
            r"across NUMBER pages": {read},
            r"NUMBER independent": {read},
            r"NUMBER int32": {read},
            r"NUMBER KB": {2 * cfg["n_kv"] * size * cfg["hd"] / 1024},
        }
    return wanted | _stated_figures(spec)


def _stated_figures(spec: MegaSpec) -> dict[str, set[float]]:
    """The same, of what was measured."""
    figures = spec.figures or spec.cpu
    if figures is None or not figures.floor:
        return {}
    drops = {name: _two_digits(error) for name, error in figures.drops.items()}
    errors = {*drops.values(), _two_digits(figures.floor)}
    if figures.paged_error is not None:
        errors.add(figures.paged_error)
    times = {float(round(error / spec.tol)) for error in drops.values()}
    wanted: dict[str, set[float]] = {
        r"NUMBER consecutive": {figures.steps},
        r"NUMBER (?:weight/token )?seeds": {figures.seeds},
        r"NUMBERx E": {_two_digits(spec.tol / figures.floor)},
        r"E = NUMBER": {_two_digits(figures.floor)},
        r"NUMBER floor": {_two_digits(figures.floor)},
        r"(?:measures|numerical floor of|relative error of) NUMBER": errors,
        r"by NUMBERx": times,
        r"is NUMBERx the tolerance": times,
    }
    if spec.perf_md.graph_us is not None:
        wanted |= {
            r"NUMBER ms row": {_two_digits(spec.perf_md.graph_us / 1e3)},
            r"still NUMBERx the floor": {round(spec.perf_md.graph_us / spec.floor_us)},
        }
    return wanted


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _stated(spec: MegaSpec) -> Iterator[str]:
    """Violations where a text states another number than the spec's, in a phrase that is known."""
    texts = {field: getattr(spec, field) for field in TEXTS}
    if spec.perf_md.floor_us > 0:
        texts["perf_md"] = spec.perf_md.text
    for field, text in texts.items():
        if not fits(text, str):
            continue
        words = re.sub(r"[*`]", "", " ".join(text.split()))
        for phrase, allowed in _statements(spec).items():
            pattern = r"(?<![\w.-])" + phrase.replace("NUMBER", NUMBER) + r"(?!\w)"
            for match in re.finditer(pattern, words):
                if not any(math.isclose(float(match[1]), value) for value in allowed):
                    expected = " or ".join(f"{value:g}" for value in sorted(allowed))
                    yield f"{field}: expected {expected} in {match[0]!r}"


def _pages(spec: MegaSpec) -> Iterator[str]:
    if spec.kind != "paged":
        return
    page_size, per_seq = spec.cfg["page_size"], spec.pages_per_seq
    if spec.max_seq % page_size:
        yield f"max_seq: expected a multiple of page_size = {page_size}, got {spec.max_seq}"
    wanted = (f"holds {2 * spec.batch * per_seq} pages", f"owns {spec.batch * per_seq} of them")
    yield from _missing("spec_md", spec.spec_md, wanted)


def _model(spec: MegaSpec) -> Iterator[str]:
    for function in FUNCTIONS:
        if f"\ndef {function}(" not in spec.model_src:
            yield f"model_src: expected a function {function}, got none"
    if ("page_table" in spec.model_src) != (spec.kind == "paged"):
        yield f"model_src: expected the reference of a {spec.kind} cache, as cfg has it"


def _regime(spec: MegaSpec) -> Iterator[str]:
    cfg, traffic = spec.cfg, spec.traffic
    wanted = [
        f"batch {spec.batch}", f"{cfg['layers']} layers", f"`d`={cfg['d']}", f"ffn={cfg['ffn']}",
        f"{cfg['n_q']} query / {cfg['n_kv']} KV heads", f"head_dim {cfg['hd']}",
        f"vocab {cfg['vocab']}", f"**{spec.prefill_len}** tokens",
        f"decode {spec.decode_steps} more", f"{traffic.weights} of weights + {traffic.kv} of KV",
        f"floor near {traffic.floor_us:.0f} us",
    ]  # fmt: skip
    if spec.kind == "paged":
        wanted.append(f"{cfg['page_size']}-token pages")
    yield from _missing("regime_md", spec.regime_md, wanted)


def _floor(spec: MegaSpec) -> Iterator[str]:
    floor = round(spec.floor_us)
    if spec.perf_md.floor_us != floor:
        yield (
            f"perf_md: expected floor_us = {floor}: {spec.weight_bytes / 1e9:.3f} GB of weights"
            f" and {spec.kv_bytes / 1e6:.1f} MB of KV at {BANDWIDTHS[spec.gpu]} TB/s,"
            f" got {spec.perf_md.floor_us}"
        )
    traffic = spec.traffic
    wanted = (f"{traffic.weights} of weights and {traffic.kv} of KV",)
    yield from _missing("perf_md", spec.perf_md.lead, wanted)


def _figures(spec: MegaSpec) -> Iterator[str]:
    figures = spec.figures
    if figures is None:
        for field in ("eager_us", "graph_us"):
            yield from _expect(f"perf_md: {field}, unmeasured", None, getattr(spec.perf_md, field))
        yield from _expect("unfused_kernels, unmeasured", None, spec.unfused_kernels)
        return
    yield from _expect("unfused_kernels", figures.kernels, spec.unfused_kernels)
    yield from _expect("perf_md: eager_us", figures.eager_us, spec.perf_md.eager_us)
    graph_us = figures.busy_us if figures.graph_us is None else figures.graph_us
    yield from _expect("perf_md: graph_us", graph_us, spec.perf_md.graph_us)
    for us in (figures.eager_us, figures.busy_us, figures.graph_us):
        if us is not None and us < spec.floor_us:
            yield f"figures: expected no time below the floor of {spec.floor_us:.0f} us, got {us}"


def _errors(spec: MegaSpec) -> Iterator[str]:
    """Violations where the table of errors in precision_md has others than the figures."""
    right, wrong = table_of(spec.precision_md)
    gate = re.findall(rf"\(the gate\)\** \| \**{NUMBER}", spec.precision_md)
    found = sorted([*right, *map(float, gate), *wrong])
    figures = spec.figures or spec.cpu
    errors = [] if figures is None else [*figures.errors.values(), *figures.drops.values()]
    wanted = sorted([*errors, spec.tol])
    if len(found) != len(wanted) or not all(map(math.isclose, found, wanted)):
        yield f"precision_md: expected a table of the errors and tol, {wanted}, got {found}"


def _gate(spec: MegaSpec) -> Iterator[str]:
    yield from _missing("correctness_md", spec.correctness_md, [f"at most **{spec.tol:g}**"])


def _tol(spec: MegaSpec) -> Iterator[str]:
    tols = re.findall(rf"(?:`tol` is `|tol = ){NUMBER}", spec.precision_md)
    if not tols or {float(tol) for tol in tols} != {spec.tol}:
        yield f"precision_md: expected it to state tol, {spec.tol:g}, got {', '.join(tols)}"


def _sources(spec: MegaSpec) -> Iterator[str]:
    sources = {"claimed": spec.claims, "measured": spec.measured, "on a CPU": spec.cpu}
    for what, figures in sources.items():
        if figures is not None:
            yield from (f"tol: {what}: {text}" for text in _margins(spec, figures))


def _margins(spec: MegaSpec, figures: Figures) -> Iterator[str]:
    for field, names, wanted in (
        ("errors", figures.errors, CORRECT),
        ("drops", figures.drops, spec.dropped),
    ):
        if missing := _absent(wanted, names):
            yield f"expected {field} of {missing}, got none"
    low, high = (margin * figures.floor for margin in FLOOR_MARGIN)
    if figures.errors and not low <= spec.tol <= high:
        yield (
            f"expected {low:.3g} to {high:.3g}, {FLOOR_MARGIN[0]} to {FLOOR_MARGIN[1]} times the"
            f" error {figures.floor:g} of a correct implementation, got {spec.tol:g}"
        )
    for name in spec.dropped:
        if figures.drops.get(name, math.inf) < DROP_MARGIN * spec.tol:
            yield (
                f"expected at most {figures.drops[name] / DROP_MARGIN:.3g}, so that {name} with"
                f" an error of {figures.drops[name]:g} fails, got {spec.tol:g}"
            )
    if figures.paged_error:
        yield f"expected paged and contiguous to agree exactly, got {figures.paged_error:g}"


def _absent(wanted: Iterable[str], names: Iterable[str]) -> str:
    return ", ".join(sorted(set(wanted) - set(names)))
