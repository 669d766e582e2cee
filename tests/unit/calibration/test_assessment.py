from __future__ import annotations

import numpy as np
import pytest

from dspark.calibration import Records, assess, auroc, brier, ece
from dspark.errors import CalibrationError
from dspark.scheduling import prefix_survival


def test_figures_are_those_of_the_cumulative_survival(simulate):
    records = simulate(0, lambda u: 2 * u, conversations=30)
    temperatures = [2.0, 2.0, 1.0, 3.0]
    assessment = assess(records, temperatures)
    for when, scales in (("before", [1, 1, 1, 1]), ("after", temperatures)):
        survival = prefix_survival(records.z, scales)
        errors = []
        for k, position in enumerate(assessment.positions):
            p, y = survival[:, k], records.survived[:, k]
            errors.append(ece(p, y))
            assert getattr(position, f"ece_{when}").value == pytest.approx(errors[-1])
            assert getattr(position, f"ece_equal_mass_{when}").value == pytest.approx(ece(p, y, binning="mass"))
            assert getattr(position, f"auroc_{when}").value == pytest.approx(auroc(p, y))
            assert getattr(position, f"brier_{when}").value == pytest.approx(brier(p, y))
            assert (position.samples, position.accepted) == (len(records), y.sum())
        assert getattr(assessment, f"mean_ece_{when}").value == pytest.approx(np.mean(errors))
    change = assessment.mean_ece_change
    assert change.value == pytest.approx(assessment.mean_ece_after.value - assessment.mean_ece_before.value)
    assert change.n == 30 and change.ci95[0] < change.value < change.ci95[1]


def test_the_identity_changes_nothing_and_is_certain_of_it(simulate):
    assessment = assess(simulate(1, conversations=20), [1, 1, 1, 1])
    assert assessment.mean_ece_change.value == 0 and assessment.mean_ece_change.ci95 == (0, 0)


def test_unknown_positions_are_left_out():
    """Position 2 is known in the first two rows only: survival .25 twice, one accepted, ECE |.5 - 1| / 2."""
    accepted = [[1, 1], [1, 0], [1, 0], [0, 0]]
    records = Records(np.zeros((4, 2)), accepted, [[1, 1], [1, 1], [1, 0], [1, 0]])
    position = assess(records, [1, 1]).positions[1]
    assert (position.samples, position.accepted) == (2, 1)
    assert position.ece_before.value == pytest.approx(0.25)


def test_what_cannot_be_measured_is_absent_with_a_reason():
    records = Records(np.zeros((3, 3)), [[1, 0, 0]] * 3, [[1, 1, 0]] * 3)
    first, second, third = assess(records, [1, 1, 1]).positions
    assert first.auroc_before is None and first.absent == {"auroc": "every prefix was accepted"}
    assert second.absent == {"auroc": "no prefix was accepted"} and second.ece_before is not None
    assert third.samples == 0 and third.ece_before is None and "samples" in third.absent


@pytest.mark.parametrize("rows", [0, 2])
def test_records_without_any_known_outcome_are_reported_as_such(rows):
    assessment = assess(Records(np.zeros((rows, 2)), np.zeros((rows, 2)), np.zeros((rows, 2))), [1, 1])
    assert assessment.mean_ece_before is None and assessment.absent
    assert [position.samples for position in assessment.positions] == [0, 0]


def test_temperatures_must_be_one_per_position(simulate):
    with pytest.raises(CalibrationError, match="3 temperatures for 4"):
        assess(simulate(2, conversations=2), [1, 1, 1])
