from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.features.compression import decode, encode
from dspark.features.sizes import bytes_per_token, last_hidden_groups

numbers = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@st.composite
def rows(draw):
    """Rows of numbers in groups, of sizes that differ by many orders of magnitude from group to group."""
    groups, width = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    count = draw(st.integers(1, 3))
    values = draw(st.lists(numbers, min_size=count * groups * width, max_size=count * groups * width))
    return torch.tensor(values, dtype=torch.float32).view(count, groups * width), groups


@settings(max_examples=100)
@given(rows())
def test_an_int8_code_is_off_by_half_a_scale_at_most(drawn):
    """The scale is what makes the largest number of the group 127, worked out here in Python's own doubles."""
    values, groups = drawn
    codes = encode(values, "int8", groups)
    assert codes.values.dtype == torch.int8 and int(codes.values.min()) >= -127
    width = values.shape[1] // groups
    found = decode(codes.values, codes.scales)
    for row in range(len(values)):
        for column in range(values.shape[1]):
            start = column // width * width
            largest = max(abs(float(value)) for value in values[row, start : start + width])
            bound = max(largest / 127, 2**-126) / 2
            off = abs(float(found[row, column]) - float(values[row, column]))
            assert off <= bound * (1 + 1e-4), (off, bound)


@settings(max_examples=100)
@given(rows())
def test_an_fp8_code_is_off_by_a_sixteenth_or_by_a_thousandth_of_a_scale(drawn):
    """e4m3 has three bits behind the point: half of 2^-3 of the number; below 2^-6 scales steps of 2^-9 scales."""
    values, groups = drawn
    codes = encode(values, "fp8", groups)
    found = decode(codes.values, codes.scales)
    scales = codes.scales.repeat_interleave(values.shape[1] // groups, dim=1)
    bound = torch.maximum(values.abs() / 16, scales * 2**-10)
    assert ((found - values).abs() <= bound * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_huge_tap_costs_the_others_nothing(dtype):
    """Two taps: the codes and the scale of one are the same whatever the other says, and so for the next token."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 16, generator=generator)
    hurt = values.clone()
    hurt[1, 3] = 3e4
    before, after = encode(values, dtype, 2), encode(hurt, dtype, 2)
    assert torch.equal(decode(*parts(before))[:, 8:], decode(*parts(after))[:, 8:])
    assert torch.equal(decode(*parts(before))[[0, 2, 3]], decode(*parts(after))[[0, 2, 3]])
    assert not torch.equal(decode(*parts(before))[1, :8], decode(*parts(after))[1, :8])


def parts(codes):
    return codes.values, codes.scales


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_largest_number_and_zeros_come_back_as_they_were(dtype):
    values = torch.tensor([[0.0, 0.0, 0.0], [-3.0, 1.5, 0.0]])
    found = decode(*parts(encode(values, dtype, 1)))
    assert found[0].tolist() == [0, 0, 0]
    assert found[1, 0] == pytest.approx(-3, rel=1e-6) and found[1, 2] == 0


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_shows_in_its_scale_alone(dtype, value):
    scales = encode(torch.tensor([[1.0, value, 1.0, 1.0]]), dtype, 2).scales
    assert torch.isfinite(scales).tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_dtypes_have_no_scales_and_are_read_as_they_are(dtype):
    values = torch.tensor([[1.001, -2.0]])
    codes = encode(values, dtype, 1)
    assert codes.scales is None
    assert torch.equal(decode(codes.values, None), values.to(getattr(torch, dtype)))


def test_bytes_per_token_are_those_of_the_paper_targets():
    """SmolLM2-135M: 5 taps and the last hidden state of 576 bfloat16 numbers are 6.9 kB (environment.md)."""
    assert bytes_per_token(576, 5, "bfloat16") == 576 * 6 * 2 + 12
    assert bytes_per_token(2560, 5, "bfloat16") == 30_732


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("width", [576, 2560, 4096, 5120])
def test_compressed_features_take_little_more_than_half(dtype, width):
    """One byte a number, four a scale: 5 of the taps and one per 64 channels of the last hidden state."""
    assert bytes_per_token(width, 5, dtype) == 6 * width + 4 * (5 + width // 64) + 12
    assert bytes_per_token(width, 5, dtype) <= 0.55 * bytes_per_token(width, 5, "bfloat16")


def test_a_width_without_groups_of_64_has_one():
    assert [last_hidden_groups(width) for width in (32, 64, 96, 576)] == [1, 1, 1, 9]
