# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from kernelkit.compare import assert_close_to_reference, half_ulp


@pytest.fixture
def ref():
    return torch.linspace(-4, 4, 512, dtype=torch.float64).view(8, 64)


def test_baseline_passes_against_itself_and_the_error_comes_back(ref):
    out = ref.bfloat16()
    error = assert_close_to_reference(out, ref, out)
    assert error == (out.double() - ref).abs().max().item()


def test_an_outlier_is_named_with_place_and_size(ref):
    out = ref.bfloat16()
    out[3, 5] += 1
    with pytest.raises(
        AssertionError, match=r"max abs error 1\.\d+ at \(3, 5\) exceeds .* 1 of 512"
    ):
        assert_close_to_reference(out, ref, ref.bfloat16())


def test_an_error_that_is_spread_fails_though_no_element_does(ref):
    baseline = ref.clone()
    baseline[0, 0] += 0.1
    with pytest.raises(AssertionError, match="relative difference of the whole tensor"):
        assert_close_to_reference(ref + 0.1, ref, baseline, floor=0)


def test_the_floor_admits_a_rounding_when_the_baseline_is_exact(ref):
    exact = torch.full_like(ref, 3.0)
    out = exact.bfloat16()
    out[0, 0] += 2**-6
    with pytest.raises(AssertionError, match="exceeds"):
        assert_close_to_reference(out, exact, exact)
    assert_close_to_reference(out, exact, exact, floor=2**-6)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_specials_must_match(ref, special):
    expected = ref.clone()
    expected[2, 1] = special
    out = expected.bfloat16()
    assert_close_to_reference(out, expected, out)
    name = {math.inf: r"\+inf", -math.inf: "-inf"}.get(special, "NaN")
    with pytest.raises(
        AssertionError, match=rf"{name} differs in 1 of 512 elements, first at \(2, 1\)"
    ):
        assert_close_to_reference(ref.bfloat16(), expected, out)


def test_an_overflow_of_the_output_dtype_is_an_infinity():
    ref = torch.tensor([1e39, 1.0], dtype=torch.float64)
    out = ref.bfloat16()
    assert assert_close_to_reference(out, ref, out) == 0


def test_shape_and_dtype_are_checked_first(ref):
    with pytest.raises(AssertionError, match=r"out: shape \(512,\), the reference has \(8, 64\)"):
        assert_close_to_reference(ref.flatten(), ref, ref)
    with pytest.raises(TypeError, match="ref64: expected float64"):
        assert_close_to_reference(ref, ref.float(), ref)


def test_empty_and_scalar():
    empty = torch.empty(0, 4, dtype=torch.float64)
    assert assert_close_to_reference(empty, empty, empty) == 0
    one = torch.tensor(2.0, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"at \(\) exceeds"):
        assert_close_to_reference(one + 1, one, one)


def test_half_ulp():
    assert half_ulp(1.0, torch.bfloat16) == 2**-8
    assert half_ulp(1.99, torch.bfloat16) == 2**-8
    assert half_ulp(4.0, torch.float16) == 2**-9
    assert half_ulp(0.0, torch.bfloat16) > 0
