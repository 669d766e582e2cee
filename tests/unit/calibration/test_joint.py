from __future__ import annotations

import numpy as np
import pytest

import dspark.calibration.temperatures as sts
from dspark.calibration import ece, fit_temperatures, joint
from dspark.calibration.joint import descend
from dspark.scheduling import prefix_survival

ONES = np.ones(4)
ALL = np.ones(4, dtype=bool)


def mean_ece(records, temperatures):
    survival = prefix_survival(records.z, temperatures)
    return np.mean([ece(survival[:, k], records.survived[:, k]) for k in range(records.gamma)])


def test_no_step_of_the_grid_improves_what_is_found(simulate):
    """The mean ECE worked out from scratch at every neighbour, one step up and one step down at each position."""
    records = simulate(0, lambda u: 2 * u, conversations=40)
    found = descend(records, ONES, ALL, sts.GRID, 15)
    least = mean_ece(records, found)
    assert least < mean_ece(records, ONES) / 2 and found[0] == pytest.approx(2, rel=0.3)
    for k in range(4):
        for move in (-1, 1):
            other = found.copy()
            other[k] = sts.GRID[int(np.abs(sts.GRID - found[k]).argmin()) + move]
            assert mean_ece(records, other) > least - 1e-12


def test_what_may_not_move_stays(simulate):
    found = descend(simulate(0, lambda u: 2 * u), ONES, np.array([True, False, True, False]), sts.GRID, 15)
    assert found[1] == found[3] == 1.0 and found[0] > 1.5


def test_many_records_are_looked_at_in_part(simulate, monkeypatch):
    """Every fifth conversation, whole; a temperature from them is one for all."""
    records = simulate(0, lambda u: 2 * u)
    monkeypatch.setattr(joint, "MOST_ROWS", 800)
    part = joint._some(records)
    assert len(part) == 800 and part.conversations == 20
    found = descend(records, ONES, ALL, sts.GRID, 15)
    assert mean_ece(records, found) < mean_ece(records, ONES) / 2


def test_the_edges_of_the_grid_are_not_left(simulate):
    found = descend(simulate(0, lambda u: 40 * u, conversations=20), ONES, ALL, sts.GRID, 15)
    assert found.max() <= sts.GRID[-1]


def forced(monkeypatch, temperatures):
    """Nothing is found left to right, and these are found jointly."""
    monkeypatch.setattr(sts, "_candidate", lambda half, k, pooled, bins: (1.0, pooled))
    monkeypatch.setattr(sts, "descend", lambda *arguments: np.array(temperatures))


def test_a_joint_fit_is_kept_if_held_out_conversations_speak_for_it(simulate, monkeypatch):
    forced(monkeypatch, [2.0, 2.0, 1.0, 2.0])
    calibration = fit_temperatures(simulate(0, lambda u: 2 * u)).calibration
    assert calibration.method == "joint" and calibration.temperatures == (2.0, 2.0, 1.0, 2.0)
    assert [position.candidate for position in calibration.positions] == [2.0, 2.0, 1.0, 2.0]
    assert [position.fallback is None for position in calibration.positions] == [True, True, False, True]
    assert calibration.held_out.temperatures == (2.0, 2.0, 1.0, 2.0)
    assert calibration.held_out.mean_ece_change.ci95[1] < 0


def test_a_joint_fit_shows_what_held_out_conversations_say_of_its_own_temperatures(simulate, monkeypatch):
    """About 1.3 is found left to right, 2, 2, 1 and 2 jointly; their changes are worked out from the held-out rows."""
    joint_ones, records = [2.0, 2.0, 1.0, 2.0], simulate(0, lambda u: 2 * u)
    monkeypatch.setattr(sts, "_candidate", lambda half, k, pooled, bins: (float(sts.GRID[67]), pooled))
    monkeypatch.setattr(sts, "descend", lambda *arguments: np.array(joint_ones))
    calibration = fit_temperatures(records).calibration
    assert calibration.method == "joint" and calibration.choices[1].temperatures[0] == sts.GRID[67]
    held_out = records.split(0)[1]
    for k, position in enumerate(calibration.positions):
        assert position.candidate == joint_ones[k]
        if joint_ones[k] == 1:
            assert position.log_loss_change is None and position.ece_change is None
            assert position.fallback == "1 is the best temperature"
            continue
        reached = np.logical_and.accumulate(np.c_[np.ones(len(held_out), bool), held_out.survived], axis=1)[:, k]
        stated = np.where(held_out.survived[reached, k], 1, -1) * held_out.z[reached, k]
        log_loss = np.log1p(np.exp(-stated / joint_ones[k])) - np.log1p(np.exp(-stated))
        assert position.log_loss_change.value == pytest.approx(log_loss.mean())
        errors = []
        for here in (joint_ones[k], 1.0):
            survival = prefix_survival(held_out.z, [*joint_ones[:k], here, *joint_ones[k + 1 :]])
            errors.append(ece(survival[:, k], held_out.survived[:, k]))
        assert position.ece_change.value == pytest.approx(errors[0] - errors[1])


@pytest.mark.parametrize("temperatures", [[0.5] * 4, [1.02] * 4])
def test_a_joint_fit_without_evidence_for_it_is_dropped(simulate, monkeypatch, temperatures):
    forced(monkeypatch, temperatures)
    calibration = fit_temperatures(simulate(3)).calibration
    assert calibration.method == "identity" and calibration.temperatures == (1.0,) * 4


def test_what_was_weighed_is_said_with_its_held_out_ece(simulate):
    """Of each choice, worked out from the half that was not fitted."""
    records = simulate(0, lambda u: 2 * u)
    calibration = fit_temperatures(records).calibration
    held_out = records.split(0)[1]
    assert [choice.method for choice in calibration.choices] == ["identity", "sts", "joint"]
    for choice in calibration.choices:
        assert choice.mean_ece.value == pytest.approx(mean_ece(held_out, choice.temperatures))
        assert choice.mean_ece.n == held_out.conversations
    chosen = next(choice for choice in calibration.choices if choice.method == calibration.method)
    assert chosen.temperatures == calibration.held_out.temperatures
    assert chosen.mean_ece.value == pytest.approx(calibration.held_out.mean_ece_after.value)


def test_where_nothing_can_be_fitted_nothing_is_weighed(calibration_case):
    calibration = fit_temperatures(calibration_case("three-samples")).calibration
    assert calibration.method == "identity" and calibration.choices == ()
