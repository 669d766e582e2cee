"""Axes: round ticks, all data within, places in proportion."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.report import scales

finite = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(st.lists(finite, min_size=1, max_size=20), st.integers(2, 10))
def test_ticks_are_round_evenly_spaced_and_hold_all_values(values, at_most):
    scale = scales.linear(values, at_most=at_most)
    slack = 1e-9 * (scale.high - scale.low)
    assert scale.low <= min(values) + slack and max(values) - slack <= scale.high
    labels = [Decimal(tick.label.replace(",", "")) for tick in scale.ticks]
    assert [float(label) for label in labels] == pytest.approx([tick.value for tick in scale.ticks])
    steps = {after - before for before, after in itertools.pairwise(labels)}
    assert len(steps) == 1, "labels are exact decimals, so equal steps are equal"
    digits = steps.pop().normalize().as_tuple()
    assert digits.sign == 0 and digits.digits in ((1,), (2,), (5,))
    assert len(labels) <= at_most + 3  # rounding both ends outwards adds at most one step each
    assert (scale.ticks[0].value, scale.ticks[-1].value) == (scale.low, scale.high)


@given(st.lists(finite, min_size=2, max_size=9, unique=True))
def test_places_keep_proportions(values):
    scale = scales.linear(values)
    assert (scale.place(scale.low), scale.place(scale.high)) == (0, 1)
    for value in values:
        assert scale.low + scale.place(value) * (scale.high - scale.low) == pytest.approx(
            value, abs=1e-6 * max(abs(scale.low), abs(scale.high))
        )


def test_ends_can_be_fixed():
    scale = scales.linear([0.31, 0.77], low=0, high=1)
    assert (scale.low, scale.high) == (0, 1)
    assert [tick.label for tick in scale.ticks] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert scales.linear([37.0], low=0).high == 40


def test_one_value_gets_room_on_both_sides():
    scale = scales.linear([10.0])
    assert scale.low < 10 < scale.high
    assert scales.linear([0.0]).low < 0 < scales.linear([0.0]).high


def test_whole_ticks_are_whole():
    assert [tick.label for tick in scales.linear([1, 2], whole=True).ticks] == ["1", "2"]
    assert [tick.label for tick in scales.linear([1, 7], whole=True).ticks] == ["1", "2", "3", "4", "5", "6", "7"]


def test_large_numbers_have_separators_and_there_is_no_minus_zero():
    assert [tick.label for tick in scales.linear([0, 20_000]).ticks] == ["0", "5,000", "10,000", "15,000", "20,000"]
    assert "-0" not in {tick.label for tick in scales.linear([-0.3, 0.3]).ticks}


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=9))
def test_logarithmic_axes_hold_all_values_and_keep_ratios(values):
    scale = scales.logarithmic(values)
    assert scale.low <= min(values) * (1 + 1e-9) and max(values) <= scale.high * (1 + 1e-9)
    assert len(scale.ticks) >= 2
    middle = math.sqrt(scale.low * scale.high)
    assert scale.place(middle) == pytest.approx(0.5)


def test_logarithmic_ticks_are_1_2_and_5_until_there_are_too_many():
    assert [tick.label for tick in scales.logarithmic([3, 70]).ticks] == ["2", "5", "10", "20", "50", "100"]
    assert [tick.label for tick in scales.logarithmic([0.02, 9000]).ticks][:3] == ["0.1", "1", "10"]


def test_an_axis_of_measured_values_has_them_for_ticks():
    scale = scales.at_values([8, 1, 4, 4])
    assert [tick.label for tick in scale.ticks] == ["1", "4", "8"]
    assert scale.place(4) - scale.place(1) == pytest.approx(2 * (scale.place(8) - scale.place(4)))
    assert 0 < scale.place(1) < scale.place(8) < 1


@pytest.mark.parametrize("make", [lambda: scales.linear([]), lambda: scales.linear([1], low=3, high=2),
                                  lambda: scales.logarithmic([]), lambda: scales.logarithmic([0, 1]),
                                  lambda: scales.at_values([-1])])  # fmt: skip
def test_axes_of_nothing_are_refused(make):
    with pytest.raises(ValueError, match=r"an axis|a logarithmic axis"):
        make()


def test_names_stand_in_their_order_and_clear_of_the_frame() -> None:
    scale = scales.named(["none", "64", "256"])
    assert [(tick.value, tick.label) for tick in scale.ticks] == [(0, "none"), (1, "64"), (2, "256")]
    assert 0 < scale.place(0) < scale.place(1) < scale.place(2) < 1
    assert scale.place(0) == pytest.approx(1 - scale.place(2))
    with pytest.raises(ValueError, match="needs values"):
        scales.named([])
