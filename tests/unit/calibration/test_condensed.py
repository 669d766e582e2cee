from __future__ import annotations

import numpy as np
import pytest

import dspark.calibration.temperatures as sts
from dspark.calibration import condensed, fit_temperatures
from dspark.calibration.condensed import StatedPoints, SurvivalPoints, log_losses
from dspark.calibration.reliability import bin_gaps
from dspark.scheduling import confidences

ROWS, GROUPS = 20_000, 8


@pytest.fixture
def rows():
    """Survival so far, logits, outcomes and groups of rows whose logits are twice as large as they should be."""
    generator = np.random.default_rng(0)
    before = generator.beta(3, 1, ROWS)
    z = generator.normal(1, 2, ROWS)
    survived = generator.random(ROWS) < before * confidences(z, 2.0)
    return before, z, survived, generator.integers(0, GROUPS, ROWS)


def test_few_rows_are_their_own_points(rows):
    """Sums over points are then those over rows, to the last bit."""
    before, z, survived, groups = rows
    points = SurvivalPoints.of(*rows, GROUPS)
    for temperature in (0.3, 1.0, 2.5):
        expected = bin_gaps(before * confidences(z, temperature), survived, 15, groups, GROUPS)
        np.testing.assert_array_equal(points.gaps(temperature, 15), expected)
        assert StatedPoints.of(z).log_loss(temperature) == log_losses(z, temperature).sum()


def test_condensed_rows_are_as_many_and_of_the_same_groups(rows, monkeypatch):
    monkeypatch.setattr(condensed, "MOST_ROWS", 0)
    before, z, survived, groups = rows
    points = SurvivalPoints.of(*rows, GROUPS)
    assert len(points.size) < ROWS / 1.5
    for group in range(GROUPS):
        mine, ours = groups == group, points.groups == group
        assert points.size[ours].sum() == mine.sum()
        assert points.survived[ours].sum() == survived[mine].sum()
        assert points.before[ours] @ points.size[ours] == pytest.approx(before[mine].sum())
        assert points.z[ours] @ points.size[ours] == pytest.approx(z[mine].sum())


def test_condensed_rows_have_the_ece_and_the_log_loss_of_all_of_them(rows, monkeypatch):
    """ECE within .0015 at every temperature of the grid, log-loss within a thousandth of the drop that decides."""
    _, z, survived, _ = rows
    stated = np.where(survived, z, -z)
    exact, exact_stated = SurvivalPoints.of(*rows, GROUPS), StatedPoints.of(stated)
    monkeypatch.setattr(condensed, "MOST_ROWS", 0)
    points, stated_points = SurvivalPoints.of(*rows, GROUPS), StatedPoints.of(stated)
    assert len(stated_points.size) <= condensed.STATED_LEVELS
    base = exact_stated.log_loss(2.0) - stated_points.log_loss(2.0)
    for temperature in sts.GRID[::4]:
        errors = [np.abs(one.gaps(temperature, 15).sum(axis=0)).sum() / ROWS for one in (exact, points)]
        assert errors[1] == pytest.approx(errors[0], abs=1.5e-3)
        if 1.5 < temperature < 2.7:
            difference = exact_stated.log_loss(temperature) - stated_points.log_loss(temperature) - base
            assert abs(difference) < sts.LIKELIHOOD_DROP / 1000


def test_a_fit_to_condensed_rows_is_the_fit_to_all_of_them_within_a_step_of_the_grid(simulate, monkeypatch):
    records = simulate(0, lambda u: 2 * u, conversations=200)
    exact = fit_temperatures(records).temperatures
    monkeypatch.setattr(condensed, "MOST_ROWS", 0)
    monkeypatch.setattr("dspark.calibration.half.MOST_ROWS", 0)
    found = fit_temperatures(records).temperatures
    step = sts.GRID[1] / sts.GRID[0]
    assert np.abs(np.log(np.array(found) / exact)).max() <= np.log(step) * 1.001
    assert min(exact) > 1.7


def test_logits_far_away_are_kept():
    """Three in a thousand lie far out; means, not middles of cells, stand for them."""
    z = np.concatenate([np.random.default_rng(0).normal(0, 1, 100_000), np.full(300, -80.0)])
    points = StatedPoints.of(z)
    assert points.size.sum() == len(z) and points.z @ points.size == pytest.approx(z.sum())
    assert points.log_loss(1.0) == pytest.approx(log_losses(z, 1.0).sum(), rel=1e-3)


def test_equal_logits_are_one_point():
    points = StatedPoints.of(np.full(60_000, 0.7))
    assert points.size.tolist() == [60_000] and points.z[0] == pytest.approx(0.7)
