from __future__ import annotations

import numpy as np
import pytest

from dspark.calibration import Records, auroc, ece
from dspark.calibration.resampling import Estimate, Resampling, mean_of


@pytest.fixture
def sample():
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (300, 1))
    accepted = generator.random((300, 1)) < 0.6
    records = Records(logits, accepted, conversation=np.repeat(np.arange(20), 15))
    return records, 1 / (1 + np.exp(-logits[:, 0])), Resampling.of(records, resamples=40, seed=1)


def repeated_rows(records, resampling, draw):
    """The rows of one bootstrap sample, written out: each as often as its group occurs."""
    return np.repeat(np.arange(len(records)), resampling.weights[draw].astype(int)[resampling.groups])


ALL = np.ones(300, dtype=bool)


def test_every_draw_is_the_statistic_of_the_repeated_rows(sample):
    records, p, resampling = sample
    y = records.survived[:, 0]
    cases = resampling.cases(ALL, y)
    error = cases.ece(p, 15)
    mean = cases.mean(p)
    area = cases.ranked(p).auroc()
    for draw in range(40):
        rows = repeated_rows(records, resampling, draw)
        assert error.draws[draw] == pytest.approx(ece(p[rows], y[rows]))
        assert mean.draws[draw] == pytest.approx(p[rows].mean())
        assert area.draws[draw] == pytest.approx(auroc(p[rows], y[rows]), abs=2e-3)  # scores in 256 levels
    assert error.value == pytest.approx(ece(p, y))
    assert area.value == auroc(p, y)


def test_auroc_draws_count_ties_one_half(sample):
    records, p, resampling = sample
    y, tied = records.survived[:, 0], np.round(p, 1)
    area = resampling.cases(ALL, y).ranked(tied).auroc()
    for draw in range(5):
        rows = repeated_rows(records, resampling, draw)
        assert area.draws[draw] == pytest.approx(auroc(tied[rows], y[rows]))


def test_whole_conversations_are_drawn_and_as_many_as_there_are(sample):
    records, _, resampling = sample
    assert (resampling.weights.sum(axis=1) == 20).all()
    assert all(len(set(resampling.groups[records.conversation == name])) == 1 for name in range(20))


def test_statistics_look_at_the_chosen_rows_only(sample):
    records, p, resampling = sample
    some = np.arange(300) < 100
    y = records.survived[some, 0]
    cases = resampling.cases(some, y)
    assert cases.ece(p[some], 15).value == pytest.approx(ece(p[some], y, 15))
    assert cases.ranked(p[some]).ece_equal_mass(15).value == pytest.approx(ece(p[some], y, 15, "mass"))
    assert cases.mean(p[some]).value == pytest.approx(p[some].mean())


@pytest.mark.parametrize("most_groups", [200, 6])
def test_n_counts_the_conversations_that_the_rows_come_from(sample, most_groups):
    """The first 100 of 20 conversations of 15 rows are of 7 of them, into how few groups they may be gathered."""
    records, p, _ = sample
    some = np.arange(300) < 100
    cases = Resampling.of(records, resamples=10, most_groups=most_groups).cases(some, records.survived[some, 0])
    area = cases.ranked(p[some]).auroc()
    assert [one.conversations for one in (cases.mean(p[some]), cases.ece(p[some], 15), area)] == [7, 7, 7]


def test_one_outcome_has_no_auroc(sample):
    _, p, resampling = sample
    assert resampling.cases(ALL, np.ones(300, dtype=bool)).ranked(p).auroc() is None


def test_draws_are_centred_on_the_value_and_cut_to_the_range():
    """Draws around 3 with a value of 1 (a biased statistic): the interval keeps their spread around the value."""
    estimate = Estimate(1.0, np.linspace(2, 4, 2001), 7)
    assert estimate.interval == pytest.approx((0.05, 1.95))
    measured = estimate.measured(low=0.5, high=1.5)
    assert measured.ci95 == (0.5, 1.5) and measured.n == 7


def test_undefined_draws_are_left_out():
    assert Estimate(1.0, np.array([np.nan, 1.0, np.inf]), 3).interval == (1.0, 1.0)


def test_without_a_defined_draw_nothing_is_certain():
    nothing = Estimate(0.25, np.array([np.nan]), 3)
    assert nothing.interval == (-np.inf, np.inf)
    assert nothing.measured(low=0).ci95 == (0, 1)


def test_differences_and_means_are_paired_draw_by_draw():
    a, b = Estimate(3.0, np.array([1.0, 5.0]), 2), Estimate(1.0, np.array([0.0, 4.0]), 1)
    assert (a - b).value == 2 and (a - b).draws.tolist() == [1, 1]
    assert mean_of([a, b]).value == 2 and mean_of([a, b]).draws.tolist() == [0.5, 4.5]
    assert mean_of([b, a]).conversations == 2


def test_intervals_of_a_mean_cover_the_truth_as_often_as_they_say():
    """40 conversations with a shared effect; a 95 % interval of the mean should miss in 2 to 9 % of 300 worlds.

    Treating rows as independent would miss far more often (that mutant is caught below).
    """
    misses = {"conversations": 0, "rows": 0}
    for seed in range(300):
        generator = np.random.default_rng(seed)
        values = np.repeat(generator.normal(0, 1, 40), 10) + generator.normal(0, 1, 400)
        for unit, names in (("conversations", np.repeat(np.arange(40), 10)), ("rows", np.arange(400))):
            records = Records(np.zeros((400, 1)), np.zeros((400, 1)), conversation=names)
            sampled = Resampling.of(records, resamples=200, seed=seed)
            low, high = sampled.cases(np.ones(400, bool), np.ones(400, bool)).mean(values).interval
            misses[unit] += not low <= 0 <= high
    assert 0.02 <= misses["conversations"] / 300 <= 0.09
    assert misses["rows"] / 300 > 0.3
