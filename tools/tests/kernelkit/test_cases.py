# SPDX-License-Identifier: Apache-2.0
import pytest

from kernelkit.cases import (
    CHAINS,
    DecodeCase,
    GemvCase,
    NormCase,
    PrefillCase,
    RotaryCase,
    SwigluCase,
)


def test_labels_and_counts():
    case = GemvCase(4, 4096, 4095, bias=True)
    assert case.label == "M=4,N=4096,K=4095,bias"
    assert GemvCase(1, 2, 3).bytes_moved == 2 * (6 + 3 + 2)
    assert GemvCase(2, 3, 5).flops == 60
    assert SwigluCase(1, 2, 8).bytes_moved == 2 * (32 + 8 + 2)
    assert NormCase(2, 8).bytes_moved == 2 * (4 * 16 + 8)
    rotary = RotaryCase(2, 3, 5, 16, interleaved=True)
    assert rotary.label == "B=2,S=3,H=5,d=16,interleaved"
    assert rotary.bytes_moved == 2 * 2 * (2 * 3 * 5 * 16) + 2 * 4 * (3 * 8)
    decode = DecodeCase(2, 7, 6, 3, 32, page=16)
    assert decode.label == "B=2,kv=7,hq=6,hk=3,d=32,page=16"
    assert decode.bytes_moved == 2 * (2 * (2 * 7 * 3 * 32) + 2 * (2 * 6 * 32))
    assert decode.flops == 2 * 6 * (2 * 7 * 32 + 2 * 7 * 32)
    prefill = PrefillCase(2, 3, 4, 2, 32, causal=True)
    assert prefill.label == "B=2,S=3,hq=4,hk=2,d=32,causal"
    assert prefill.bytes_moved == 2 * (2 * 2 * 3 * 4 * 32 + 2 * 2 * 3 * 2 * 32)
    assert prefill.flops == 2 * 4 * 2 * (3 * 3 * 32)
    assert PrefillCase(2, 3, 4, 2, 32, causal=False).flops == 2 * prefill.flops


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.model)
def test_each_projection_reads_something_wide_enough(chain):
    widths = {None: chain.hidden}
    for projection in chain.projections:
        assert widths[projection.source] >= projection.k
        widths[projection.name] = projection.n


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("LLaMA 2 7B", 6.48),
        ("LLaMA 3 8B", 6.98),
        ("LLaMA 2 13B", 12.69),
        ("GPT-NeoX 20B", 19.93),
        ("Qwen2 7B", 6.53),
        ("LLaMA 3 70B", 68.45),
        ("OPT 1.3B", 1.21),
    ],
)
def test_parameters_in_the_projections(model, billions):
    chain = next(c for c in CHAINS if c.model == model)
    assert chain.layers * chain.weight_bytes / 2e9 == pytest.approx(billions, abs=0.01)
