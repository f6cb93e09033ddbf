# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from kernelkit.poison import guarded_output, misaligned, poison_

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_a_complete_output_passes(dtype, offset):
    output = guarded_output((3, 5), dtype, offset=offset)
    output.tensor.copy_(torch.ones(3, 5))
    output.check()
    assert output.tensor.is_contiguous()
    assert output.tensor.data_ptr() % 64 == offset * dtype.itemsize % 64


def test_a_nan_that_was_written_counts_as_written():
    output = guarded_output((4,))
    output.tensor.fill_(math.nan)
    output.check()


def test_a_missing_element_is_named():
    output = guarded_output((2, 4))
    assert output.tensor.isnan().all()
    output.tensor[0] = 1
    with pytest.raises(AssertionError, match=r"4 of 8 elements were never written, .* index 4"):
        output.check()


@pytest.mark.parametrize(("zone", "place"), [("before", -1), ("after", 8)])
def test_a_write_around_the_output_is_named(zone, place):
    output = guarded_output((8,), offset=3)
    output.tensor.fill_(1)
    start = output.tensor.storage_offset()
    output.tensor.as_strided((1,), (1,), start + place).fill_(1)
    with pytest.raises(AssertionError, match=f"1 elements {zone} the output .* nearest 1 from"):
        output.check()


@pytest.mark.parametrize("padding", [0, 3])
def test_misaligned_keeps_values_amid_poison(padding):
    x = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    view = misaligned(x, 5, row_padding=padding)
    assert torch.equal(view, x)
    assert view.stride() == (4 + padding, 1)
    assert view.data_ptr() % 64 == 10
    storage = view.as_strided((view.untyped_storage().nbytes() // 2,), (1,), 0)
    assert int(storage.isnan().sum()) == storage.numel() - 12


def test_poison_of_each_kind():
    assert poison_(torch.zeros(2)).isnan().all()
    assert poison_(torch.zeros(2, dtype=torch.int32)).tolist() == [2**31 - 1] * 2
    assert poison_(torch.zeros(2, dtype=torch.bool)).all()
