"""Measured numbers carry an interval that covers as often as it says."""

from __future__ import annotations

import numpy as np

from dspark.measured import Measured, bootstrap, bootstrap_sums, ratio_of_sums


def test_the_interval_of_a_mean_agrees_with_the_normal_approximation() -> None:
    """For 400 normal values the 95 % interval of the mean is +- 1.96 s / sqrt(n)."""
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    measured = bootstrap(len(values), lambda chosen: float(values[chosen].mean()), resamples=4000)
    assert measured is not None
    half = 1.96 * values.std() / 20
    assert measured.n == 400
    assert abs(measured.value - values.mean()) < 1e-12
    assert abs(measured.ci95[0] - (values.mean() - half)) < 0.03
    assert abs(measured.ci95[1] - (values.mean() + half)) < 0.03


def test_a_pooled_ratio_weighs_units_by_their_denominator() -> None:
    measured = ratio_of_sums(np.array([1.0, 9.0]), np.array([1.0, 3.0]))
    assert measured is not None
    assert measured.value == 2.5  # not the mean of 1 and 3
    assert measured.ci95[0] >= 1.0
    assert measured.ci95[1] <= 3.0


def test_what_cannot_be_measured_is_absent_not_nan() -> None:
    assert bootstrap(0, lambda chosen: 1.0) is None
    assert bootstrap(3, lambda chosen: float("nan")) is None
    assert ratio_of_sums(np.zeros(3), np.zeros(3)) is None


def test_resamples_on_which_the_statistic_is_undefined_are_left_out() -> None:
    measured = ratio_of_sums(np.array([1.0, 0.0]), np.array([1.0, 0.0]), resamples=200)
    assert measured is not None
    assert measured.ci95 == (1.0, 1.0)
    assert "n=2" in str(measured)


def test_a_measured_number_refuses_infinity() -> None:
    try:
        Measured(value=float("inf"), n=1, ci95=(0, 1))
    except ValueError:
        return
    raise AssertionError("infinity was accepted")


def test_the_bootstrap_of_sums_is_the_bootstrap_of_what_they_come_to() -> None:
    """Two ways to resample one ratio: their bounds differ by the noise of 4000 resamples alone."""
    columns = np.random.default_rng(3).gamma(4, 1, (60, 2))
    one = bootstrap_sums(columns, lambda sums: sums[..., 0] / sums[..., 1], resamples=4000)
    other = ratio_of_sums(columns[:, 0], columns[:, 1], resamples=4000, seed=1)
    assert one is not None and other is not None
    assert np.isclose(one.value, other.value, rtol=1e-12) and one.n == other.n == 60
    assert np.allclose(one.ci95, other.ci95, atol=0.02)
    assert bootstrap_sums(np.zeros((0, 1)), lambda sums: sums[..., 0]) is None
    assert bootstrap_sums(np.zeros((3, 1)), lambda sums: 1 / sums[..., 0]) is None
