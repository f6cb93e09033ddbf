# SPDX-License-Identifier: Apache-2.0
import ast
import inspect
import math

import pytest
import torch

from mega_factory.models import contiguous, paged
from mega_factory.specs import load_all
from mega_factory.twins import DROPS, Twin, relative_error
from mega_factory.verify import MODELS, Fixture, clone, errors_of, paged_error

SPECS = load_all()
BY_NAME = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
BATCH = SPECS["megakernel-gqa-paged-decode-batch8"]
SCALE = BATCH.tiny()
ARGUMENTS = (SCALE.cfg, SCALE.batch, SCALE.prefill_lens, SCALE.max_seq)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_reference_is_self_contained(model):
    imports = [
        node for node in ast.walk(ast.parse(model.MODEL_SRC)) if "Import" in type(node).__name__
    ]
    names = {
        name.split(".")[0]
        for node in imports
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert names <= {"__future__", "math", "pathlib", "typing", "torch"}
    assert inspect.getsource(model) == model.MODEL_SRC


def test_the_references_differ_in_the_cache_only():
    for name in ("make_weights", "rope_tables", "rope", "cached_tokens", "rmsnorm", "attention"):
        assert inspect.getsource(getattr(paged, name)) == inspect.getsource(
            getattr(contiguous, name)
        )
    for name in ("SELF_ATTENTION", "RESIDUAL", "PASSAGE", "VALUE_OFFSET"):
        assert getattr(paged, name) == getattr(contiguous, name)


def test_the_pool_is_twice_what_is_owned():
    cache = paged.make_kv_cache(*ARGUMENTS, 3, "cpu")
    table = cache["page_table"]
    per_seq = math.ceil(SCALE.max_seq / SCALE.cfg["page_size"])
    assert (table.shape, table.dtype) == ((8, per_seq), torch.int32)
    assert len(table.unique()) == table.numel()
    assert not torch.equal(table.flatten().sort().values, table.flatten())
    assert table.max() >= table.numel()
    for pool in (*cache["k"], *cache["v"]):
        assert pool.shape == (2 * table.numel(), 2, SCALE.cfg["page_size"], 16)
        assert pool.dtype == torch.bfloat16
        assert pool.isfinite().all()
    assert not torch.equal(table, paged.make_kv_cache(*ARGUMENTS, 4, "cpu")["page_table"])


def test_the_page_size_changes_nothing_but_the_storage():
    contents = contiguous.make_kv_cache(*ARGUMENTS, 3, "cpu")
    cache = paged.make_kv_cache(*ARGUMENTS, 3, "cpu")
    for layer, pair in enumerate(contents):
        for name, whole in zip("kv", pair, strict=True):
            for b, length in enumerate(SCALE.prefill_lens):
                pages = [cache[name][layer][page] for page in cache["page_table"][b]]
                assert torch.equal(torch.cat(pages, dim=1)[:, :length], whole[b, :, :length])


@BY_NAME
def test_paged_and_contiguous_agree_exactly(spec):
    assert paged_error(spec, spec.tiny(), "cpu") == 0


@pytest.mark.parametrize("kind", MODELS)
def test_a_position_may_be_an_int_or_a_tensor(kind):
    spec = SPECS["megakernel-gqa-paged-decode"]
    fixture = Fixture(spec, spec.tiny(), 0, "cpu", kind)
    logits = []
    for position in (29, torch.tensor(29), torch.tensor([29])):
        cache = clone(fixture.kv_cache)
        handle = fixture.model.build_model(
            fixture.weights, cache, fixture.cfg, fixture.scale.max_seq
        )
        logits.append(fixture.model.decode_step(handle, fixture.tokens[0], position))
    assert logits[0].shape == (1, 256)
    assert logits[0].dtype == torch.bfloat16
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@BY_NAME
def test_the_tolerance_tells_wrong_from_correct(spec):
    errors = errors_of(Fixture(spec, spec.tiny(), 1, "cpu", spec.kind), spec.drops)
    for name, error in errors.items():
        assert (error > spec.tol) == (name in DROPS), f"{name}: {error}"


@pytest.mark.parametrize("drop", DROPS)
def test_a_drop_is_wrong_only_by_its_feature(drop):
    # One sequence, whose pages lie in order, and as many KV heads as query heads.
    spec = SPECS["megakernel-gqa-paged-decode"]
    fixture = Fixture(spec, spec.tiny(), 0, "cpu", "paged")
    fixture.cfg["n_q"] = fixture.cfg["n_kv"]
    fixture.weights = paged.make_weights(fixture.cfg, 0, "cpu")
    table = fixture.kv_cache["page_table"]
    table.copy_(torch.arange(table.numel()).view_as(table))
    right, wrong = fixture.twin(full=True), fixture.twin(full=True, drop=drop)
    assert torch.equal(right(0), wrong(0)) == (drop != "never_append")


def test_a_model_may_have_a_head_of_its_own():
    cfg = SCALE.cfg | {"tied": False}
    weights = paged.make_weights(cfg, 0, "cpu")
    tokens, positions = torch.arange(8), torch.tensor(SCALE.prefill_lens)
    logits = []
    for name in ("lm_head", "embed"):
        cache = paged.make_kv_cache(*ARGUMENTS, 0, "cpu")
        given = weights | {"lm_head": weights[name]}
        handle = paged.build_model(given, cache, cfg, SCALE.max_seq)
        logits.append(paged.decode_step(handle, tokens, positions))
        twin = Twin(given, paged.make_kv_cache(*ARGUMENTS, 0, "cpu"), cfg, full=True)
        assert relative_error(twin.decode_step(tokens, positions), logits[-1]) < 0.05
    assert relative_error(logits[0], logits[1]) > 0.5


def test_a_step_reads_no_token_past_its_position():
    cache = paged.make_kv_cache(*ARGUMENTS, 0, "cpu")
    weights = paged.make_weights(SCALE.cfg, 0, "cpu")
    positions = torch.tensor(SCALE.prefill_lens)
    written = torch.zeros(cache["k"][0].shape[0], SCALE.cfg["page_size"], dtype=torch.bool)
    for b, length in enumerate(SCALE.prefill_lens):
        for pos in range(length):
            page = cache["page_table"][b, pos // SCALE.cfg["page_size"]]
            written[page, pos % SCALE.cfg["page_size"]] = True
    for pool in (*cache["k"], *cache["v"]):
        pool.masked_fill_(~written[:, None, :, None], math.nan)
    handle = paged.build_model(weights, cache, SCALE.cfg, SCALE.max_seq)
    assert paged.decode_step(handle, torch.arange(8), positions).isfinite().all()
