"""One spelling of a measured number for every table: value and interval, or a dash."""

from __future__ import annotations

import pytest

from dspark.measured import Measured
from dspark.report.words import NOTHING, interval, percent, significant

NUMBER = Measured(value=0.0123456, n=5, ci95=(-0.00412, 1234.5))


@pytest.mark.parametrize("spelled, wanted", [
    (interval(NUMBER), "0.012 [-0.004, 1234.500]"),
    (interval(NUMBER, 1), "0.0 [-0.0, 1234.5]"),
    (significant(NUMBER), "0.0123 [-0.00412, 1.23e+03]"),
    (significant(NUMBER, 4), "0.01235 [-0.00412, 1234]"),
    (percent(NUMBER), "+1.2 % [-0.4, +123450.0]"),
])  # fmt: skip
def test_a_number_stands_with_its_interval(spelled: str, wanted: str):
    assert spelled == wanted


@pytest.mark.parametrize("spell", [interval, significant, percent])
def test_what_was_not_measured_is_a_dash(spell):
    assert spell(None) == NOTHING
