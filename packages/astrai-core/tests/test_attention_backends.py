# SPDX-License-Identifier: Apache-2.0
"""Which backend serves a call of attention: context > ASTR_BACKEND > cuda > flash > torch."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import astrai_core
from astrai_core import ATTN_BACKEND, PagedKVCache, attention, attn_backend, get_backend
from astrai_core.attn import (
    AttentionBackend,
    CudaBackend,
    FlashAttnBackend,
    TorchNativeBackend,
    backends,
)
from conftest import Site, forget, install_attention

Gpus = Callable[..., None]
ALL = ("cuda", "flash", "torch_native")


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


Q, K = ones(2, 3, 4, 64), ones(2, 3, 2, 64)


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    backends.flash_attn.cache_clear()
    yield
    backends.flash_attn.cache_clear()


@pytest.fixture
def no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn is not installed, whatever this machine has."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for flash-attn that returns 7, and keeps what it was called with."""
    module: Any = ModuleType("flash_attn")
    module.calls = []

    def varlen(q: Tensor, *args: Any, **options: Any) -> Tensor:
        module.calls.append((q, *args, options))
        return torch.full_like(q, 7)

    module.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.fixture
def kernels(site: Site, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A usable family, and CPU tensors that seem to be on its GPU; its native module."""
    native = install_attention(site)
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    return native


def outcome(*args: Any, **options: Any) -> tuple[str, dict[str, str]]:
    """The backend that served a call, and why each other one did not."""
    with astrai_core.explain() as report:
        attention(*(args or (Q, K, K)), **options)
    (row,) = report.rows
    assert row.op == "attention" and {row.chosen, *row.passed_over} >= {*ALL}
    return row.chosen, dict(row.passed_over)


@pytest.mark.usefixtures("kernels", "flash")
def test_by_default_cuda_then_flash_then_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(fwd="prefill") == (
        "cuda",
        {"flash": "cuda comes first", "torch_native": "cuda comes first"},
    )
    assert outcome(fwd=None) == (
        "flash",
        {
            "cuda": "without a cache its kernels are for fwd='decode' and 'prefill' only",
            "torch_native": "flash comes first",
        },
    )
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert outcome(attn_mask=mask)[0] == "torch_native"
    assert outcome(attn_mask=mask, fwd="prefill")[0] == "cuda"
    assert outcome(is_causal=True)[0] == "flash"
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    backends.flash_attn.cache_clear()
    assert outcome() == (
        "torch_native",
        {
            "cuda": "without a cache its kernels are for fwd='decode' and 'prefill' only",
            "flash": "flash-attn is not installed; pip install flash-attn",
        },
    )


@pytest.mark.usefixtures("kernels", "flash")
@pytest.mark.parametrize("name", ALL)
def test_environment_over_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTR_BACKEND", name)
    chosen, passed_over = outcome(fwd="prefill")
    assert chosen == get_backend().name == name
    assert passed_over == {other: f"ASTR_BACKEND={name}" for other in ALL if other != name}


@pytest.mark.usefixtures("kernels", "flash")
def test_the_environment_falls_back_to_the_first_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTR_BACKEND", "flash")
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert outcome(attn_mask=mask, fwd="prefill") == (
        "cuda",
        {"flash": "attn_mask: flash-attn takes none", "torch_native": "cuda comes first"},
    )
    monkeypatch.setenv("ASTR_BACKEND", "cuda")
    assert outcome()[0] == "flash"
    assert outcome(attn_mask=mask)[0] == "torch_native"


@pytest.mark.parametrize("value", ["", "torch", "CUDA", "auto"])
def test_another_value_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTR_BACKEND", value)
    message = f"^ASTR_BACKEND: expected cuda, flash, torch_native, got '{value}'$"
    for call in (get_backend, outcome):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.usefixtures("kernels", "flash")
def test_context_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTR_BACKEND", "flash")
    for name in ALL:
        with attn_backend(name):
            chosen, passed_over = outcome(fwd="prefill")
        assert chosen == name
        assert set(passed_over.values()) == {f"attn_backend() demands {name}"}


@pytest.mark.usefixtures("no_flash")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda", "head_dim = 8: its kernels take 32, 64, 128, 256"),
        ("flash", "flash-attn is not installed; pip install flash-attn"),
    ],
)
def test_the_context_is_strict(name: str, words: str) -> None:
    q = ones(1, 2, 1, 8)
    message = rf"^attention: {name} is demanded by attn_backend\(\): {words}$"
    with attn_backend(name), pytest.raises(RuntimeError, match=message):
        attention(q, q, q, fwd="prefill")
    assert torch.equal(attention(q, q, q, fwd="prefill"), q)


def test_the_context_takes_enum_name_class_and_instance_and_nests() -> None:
    assert [backend.value for backend in ATTN_BACKEND] == [*ALL]
    mine = TorchNativeBackend()
    with attn_backend(ATTN_BACKEND.CUDA) as outer:
        assert isinstance(outer, CudaBackend) and get_backend() is outer
        with attn_backend("flash"):
            assert isinstance(get_backend(), FlashAttnBackend)
            with attn_backend(TorchNativeBackend):
                assert type(get_backend()) is TorchNativeBackend
                with attn_backend(mine):
                    assert get_backend() is mine
        assert get_backend() is outer
        with pytest.raises(KeyError), attn_backend("flash"):
            raise KeyError
        assert get_backend() is outer
    assert get_backend() is not outer


@pytest.mark.parametrize("choice", ["torch", "", None, 3, int, object()])
def test_another_choice_is_an_error(choice: Any) -> None:
    words = "^attn_backend: expected cuda, flash, torch_native, or an AttentionBackend class or"
    with pytest.raises(ValueError, match=words), attn_backend(choice):
        pass


@pytest.mark.parametrize("kind", [AttentionBackend, type("Bare", (AttentionBackend,), {})])
def test_an_abstract_class_is_an_error(kind: Any) -> None:
    words = f"^attn_backend: {kind.__name__} is abstract, it has no forward$"
    with pytest.raises(ValueError, match=words), attn_backend(kind):
        pass


class Zeros(AttentionBackend):
    def forward(self, q: Tensor, *args: Any, **options: Any) -> Tensor:
        del args, options
        return torch.zeros_like(q)


def test_a_backend_of_ones_own() -> None:
    with attn_backend(Zeros):
        assert torch.equal(attention(Q, K, K), torch.zeros_like(Q))
        assert outcome()[0] == get_backend().name == "Zeros"
    with attn_backend(type("Named", (Zeros,), {"name": "zeros"})):
        assert outcome()[0] == "zeros"
    with pytest.raises(TypeError, match="abstract"):
        AttentionBackend()  # type: ignore[abstract]


def test_threads_and_tasks_have_their_own() -> None:
    names = []
    with attn_backend(Zeros):
        thread = threading.Thread(target=lambda: names.append(get_backend().name))
        thread.start()
        thread.join()
    assert names != ["Zeros"] and len(names) == 1

    async def task(backend: Any) -> AttentionBackend:
        with attn_backend(backend):
            await asyncio.sleep(0)
            return get_backend()

    async def both() -> list[AttentionBackend]:
        return list(await asyncio.gather(task("cuda"), task("flash")))

    assert [backend.name for backend in asyncio.run(both())] == ["cuda", "flash"]


@pytest.mark.usefixtures("no_flash")
def test_the_backend_in_force_can_be_used(
    site: Site, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get_backend().name == "torch_native"
    install_attention(site)
    assert get_backend().name == "torch_native"  # no GPU
    gpus((9, 0))
    assert get_backend().name == "cuda"
    monkeypatch.setenv("ASTR_BACKEND", "flash")
    assert get_backend().name == "cuda"
    forget()
    gpus((7, 5))
    assert get_backend().name == "torch_native"
    why = CudaBackend().unavailable()
    assert why is not None and why.startswith("cuda:0 is sm_75, this astrai-attention wheel has")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": Q.float()}, "float32 operands: its kernels take bfloat16"),
        ({"v": K.clone().requires_grad_()}, "training: an operand requires grad, and its kernels"),
        ({"q": ones(2, 0, 4, 64)}, "there is nothing to compute"),
        ({"q": Q.as_subclass(type("Sub", (Tensor,), {}))}, "Sub is no plain tensor"),
        ({"q": ones(2, 3, 4, 96), "k": ones(2, 3, 2, 96), "v": ones(2, 3, 2, 96)}, "head_dim = 96"),
    ],
)
def test_what_the_kernels_do_not_take(kernels: Any, changes: dict[str, Tensor], words: str) -> None:
    call = {"q": Q, "k": K, "v": K, "fwd": "prefill"}
    backend = CudaBackend()
    assert backend.why_not(**call) is None
    why = backend.why_not(**call | changes)
    assert why is not None and why.startswith(words)
    assert kernels.calls == []


@pytest.mark.usefixtures("kernels")
def test_what_hooks_into_torch_is_torchs() -> None:
    def call(q: Tensor) -> Tensor:
        reasons.append(CudaBackend().why_not(q, K, K, fwd="prefill"))
        return q

    reasons: list[str | None] = []
    torch.vmap(call)(Q[None])
    assert reasons == ["functorch transforms the call"]


def test_a_family_that_lacks_the_op(site: Site, gpus: Gpus, monkeypatch: Any) -> None:
    install_attention(site, OPS={"attn_decode": ("bfloat16",)})
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    chosen, passed_over = outcome(fwd="prefill")
    assert chosen != "cuda"
    assert passed_over["cuda"].startswith("astrai-attention 0.1.0 has no attn_prefill for bfloat16")


def test_each_call_has_its_op(kernels: Any) -> None:
    cache = PagedKVCache(1, 8, 4, 2, 64, device="cpu")
    seqs = [cache.new_sequence(), cache.new_sequence()]
    q, k = ones(2, 1, 4, 64), ones(2, 1, 2, 64)
    attention(q, k, k, fwd="decode")
    attention(q, k, k, fwd="prefill")
    attention(Q, K, K, cache.begin_step(seqs, 3))
    attention(q, k, k, cache.begin_step(seqs, 1), fwd="prefill")
    assert kernels.calls == [
        "attn_decode",
        "attn_prefill",
        "attn_paged_prefill",
        "attn_paged_decode",
    ]
    step = cache.begin_step(seqs, 1)
    mask = torch.ones(2, 5, dtype=torch.bool)
    why = outcome(q, k, k, step, attn_mask=mask)[1]["cuda"]
    assert why == "attn_mask: its kernels over a cache take none"


@pytest.mark.usefixtures("gpus")
def test_flash_gets_packed_operands(
    flash: Any, monkeypatch: pytest.MonkeyPatch, gpus: Gpus
) -> None:
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    assert outcome(Q, K[:, :2], K[:, :2], is_causal=True)[0] == "flash"
    q, k, _, cu_q, cu_k, max_q, max_k, options = flash.calls[0]
    assert (q.shape, k.shape, max_q, max_k) == ((6, 4, 64), (4, 2, 64), 3, 2)
    assert (cu_q.tolist(), cu_k.tolist(), options) == ([0, 3, 6], [0, 2, 4], {"causal": True})


@pytest.mark.usefixtures("flash")
def test_the_result_of_flash_is_contiguous(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus((9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    q = ones(1, 4, 3, 64).transpose(1, 2)
    with attn_backend("flash"):
        y = attention(q, K[:1], K[:1])
    assert y.is_contiguous() and torch.equal(y, torch.full_like(y, 7))


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("variable", [None, "flash"])
def test_flash_is_not_for_older_gpus(variable: Any, gpus: Gpus, monkeypatch: Any) -> None:
    if variable is not None:
        monkeypatch.setenv("ASTR_BACKEND", variable)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    gpus((7, 5))
    why = "cuda:0 is sm_75, flash-attn needs sm_80 or newer"
    assert FlashAttnBackend().unavailable() == why
    chosen, passed_over = outcome()
    assert chosen == get_backend().name == "torch_native" and passed_over["flash"] == why
    with attn_backend("flash"), pytest.raises(RuntimeError, match=why):
        attention(Q, K, K)
    gpus((7, 5), (8, 0))
    assert get_backend().name == "flash" and outcome()[0] == "torch_native"
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 1)
    assert outcome()[0] == "flash"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": Q.float(), "k": K.float(), "v": K.float()}, "flash-attn takes bfloat16 or float16"),
        ({"v": K.half()}, "flash-attn takes bfloat16 or float16"),
        ({"q": Q[..., :4], "k": K[..., :4], "v": K[..., :4]}, "head_dim = 4: flash-attn takes"),
        ({"k": K[:, :0], "v": K[:, :0]}, "there is nothing to compute"),
        ({}, "an operand is not on a CUDA device"),
    ],
)
@pytest.mark.usefixtures("flash")
def test_what_flash_does_not_take(changes: dict[str, Tensor], words: str) -> None:
    why = FlashAttnBackend().why_not(**{"q": Q, "k": K, "v": K} | changes)
    assert why is not None and why.startswith(words)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise OSError('undefined symbol')", "OSError: undefined symbol"),
        ("raise OSError('undefined\\n  symbol')", "OSError: undefined symbol"),
        (
            "class Mute(OSError):\n def __str__(self): raise KeyError\nraise Mute",
            "Mute: its text raises KeyError",
        ),
    ],
)
def test_a_flash_attn_that_does_not_import(site: Site, code: str, words: str) -> None:
    (site.folder / "flash_attn.py").write_text(code, "utf-8")
    sys.modules.pop("flash_attn", None)
    assert FlashAttnBackend().unavailable() == f"importing flash_attn failed: {words}"
    with attn_backend("flash"), pytest.raises(RuntimeError, match=f"{words}$"):
        attention(Q, K, K)


@pytest.mark.parametrize("backend", [CudaBackend, FlashAttnBackend, TorchNativeBackend, None])
def test_another_fwd_is_an_error(backend: Any) -> None:
    call: Any = attention if backend is None else backend().forward
    with pytest.raises(
        ValueError, match=r"^fwd: expected 'decode', 'prefill' or None, got 'train'"
    ):
        call(Q, K, K, fwd="train")
