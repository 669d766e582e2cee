from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.calibration import auroc, brier, ece, reliability_table
from dspark.calibration.reliability import bin_index
from dspark.errors import CalibrationError


def test_ece_of_equal_width_bins_by_hand():
    """Two bins. Low: .1 .3, one accepted: |.4 - 1| = .6. High: .5 .9 1., two accepted: |2.4 - 2| = .4. Sum / 5."""
    assert ece([0.1, 0.3, 0.5, 0.9, 1.0], [0, 1, 0, 1, 1], bins=2) == pytest.approx((0.6 + 0.4) / 5)


def test_ece_of_equal_mass_bins_by_hand():
    """Median .5 goes up. Low two: .1 .3 with one accepted; high three: .5 .6 1. with two: |.4-1| + |2.1-2| over 5."""
    assert ece([0.1, 0.3, 0.5, 0.6, 1.0], [0, 1, 0, 1, 1], bins=2, binning="mass") == pytest.approx(0.7 / 5)


def test_equal_mass_bins_hold_the_same_number_of_different_values():
    values = np.random.default_rng(0).random(1500)
    assert set(np.bincount(bin_index(values, 15, "mass"))) == {100}


def test_equal_values_share_a_bin_of_equal_mass():
    """Quartiles of .2 .2 .2 .2 .7 .8 .9 1 are .2, .45 and .825."""
    assert bin_index(np.array([0.2, 0.2, 0.2, 0.2, 0.7, 0.8, 0.9, 1.0]), 4, "mass").tolist() == [1] * 4 + [2, 2, 3, 3]


def test_perfect_forecasts_score_zero_and_opposite_ones_one():
    assert ece([0.0, 1.0], [0, 1]) == 0 and brier([0.0, 1.0], [0, 1]) == 0
    assert ece([0.0, 1.0], [1, 0]) == 1 and brier([0.0, 1.0], [1, 0]) == 1


def test_brier_by_hand():
    assert brier([0.5, 0.8], [1, 0]) == pytest.approx((0.25 + 0.64) / 2)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.2, 0.7]), st.booleans()), min_size=1, max_size=25))
def test_auroc_is_the_share_of_pairs_in_order_with_ties_at_one_half(rows):
    """Against the definition: every pair of an accepted and a rejected case, counted one by one."""
    accepted = [score for score, happened in rows if happened]
    rejected = [score for score, happened in rows if not happened]
    pairs = [(a > b) + 0.5 * (a == b) for a, b in itertools.product(accepted, rejected)]
    area = auroc([score for score, _ in rows], [happened for _, happened in rows])
    assert area is None if not pairs else area == pytest.approx(np.mean(pairs))


def test_the_reliability_table_leaves_empty_bins_out():
    """Bins of width .25: [.25, .5) holds .3 and .4; [.75, 1] holds 1."""
    low, high = reliability_table([0.3, 0.4, 1.0], [0, 1, 1], bins=4)
    assert (low.low, low.high, low.count, low.accepted_rate) == (0.25, 0.5, 2, 0.5)
    assert low.mean_confidence == pytest.approx(0.35)
    assert (high.low, high.high, high.count, high.mean_confidence, high.accepted_rate) == (0.75, 1, 1, 1, 1)


@pytest.mark.parametrize("score", [ece, brier, auroc, reliability_table])
@pytest.mark.parametrize(("probabilities", "outcomes"), [([], []), ([0.5], [1, 0]), ([[0.5]], [[1]])])
def test_scores_need_one_outcome_per_probability(score, probabilities, outcomes):
    with pytest.raises(CalibrationError, match="one outcome per probability"):
        score(probabilities, outcomes)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(value):
    with pytest.raises(CalibrationError, match=r"\[0, 1\]"):
        ece([value], [1])
