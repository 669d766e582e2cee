from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from dspark.calibration import (
    Calibration,
    CalibrationReport,
    ece,
    fit_temperatures,
    read_reliability,
    read_report,
    write_absence,
    write_results,
)
from dspark.errors import CalibrationError
from dspark.scheduling import SchedulerConfig


@pytest.fixture(scope="module")
def results(simulate):
    greedy = fit_temperatures(simulate(0, lambda u: 2 * u, temperature=0.0, label="greedy_match"))
    return [greedy, fit_temperatures(simulate(1, conversations=20))]


def test_what_is_written_is_read_back(tmp_path, results):
    report = write_results(tmp_path, results)
    assert read_report(tmp_path / "calibration.json") == report
    assert read_reliability(tmp_path / "reliability.csv") == results[0].reliability + results[1].reliability
    assert json.loads((tmp_path / "calibration.json").read_text())["schema"] == "dspark/calibration/1"


def test_writing_twice_gives_the_same_bytes(tmp_path, results):
    for name in ("a", "b"):
        write_results(tmp_path / name, results)
    for file in ("calibration.json", "reliability.csv"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_reliability_bars_add_up_to_the_reported_ece(results):
    """ECE = sum over bars of count * |confidence - rate| / samples, taken from the table alone."""
    result = results[0]
    for when in ("before", "after"):
        for position in result.calibration.held_out.positions:
            bars = [row for row in result.reliability if (row.position, row.when) == (position.position, when)]
            error = sum(bar.count * abs(bar.mean_confidence - bar.accepted_rate) for bar in bars) / position.samples
            assert error == pytest.approx(getattr(position, f"ece_{when}").value)
            assert sum(bar.count for bar in bars) == position.samples


def test_the_scheduler_takes_keys_and_temperatures_from_the_report(tmp_path, results):
    report = write_results(tmp_path, results)
    config = SchedulerConfig(gamma=report.gamma, calibrations=report.temperatures, curves={})
    assert config.calibration(0.0).temperatures == results[0].temperatures
    assert config.calibration(1.0).label == "sampled"


def test_results_of_one_sampling_or_of_different_gamma_do_not_go_together(tmp_path, results, simulate):
    with pytest.raises(CalibrationError, match=r"two results for temperature 0, .*label greedy_match"):
        write_results(tmp_path, [results[0], results[0]])
    short = fit_temperatures(simulate(2, means=(1.0, 1.0), conversations=2))
    with pytest.raises(CalibrationError, match="2 temperatures for gamma 4"):
        write_results(tmp_path, [results[0], short])
    with pytest.raises(CalibrationError, match="no calibration result"):
        write_results(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_contradicts_itself_is_refused(results):
    fields = results[1].calibration.model_dump()
    with pytest.raises(ValidationError, match="differ from those of the positions"):
        Calibration.model_validate({**fields, "temperatures": (2.0, 1.0, 1.0, 1.0)})
    held_out = {**fields["held_out"], "temperatures": (1.0,)}
    with pytest.raises(ValidationError, match="another number of positions"):
        Calibration.model_validate({**fields, "held_out": held_out})
    with pytest.raises(ValidationError, match="greater than 0"):
        Calibration.model_validate({**fields, "temperatures": (0.0, 1.0, 1.0, 1.0)})


def test_a_report_of_another_schema_or_with_unknown_keys_is_refused(tmp_path, results):
    path = tmp_path / "calibration.json"
    write_results(tmp_path, results)
    text = path.read_text()
    path.write_text(text.replace("calibration/1", "calibration/2"))
    with pytest.raises(CalibrationError, match="calibration/2"):
        read_report(path)
    path.write_text(text.replace('"gamma"', '"extra": 1, "gamma"'))
    with pytest.raises(CalibrationError, match="extra"):
        read_report(path)
    with pytest.raises(CalibrationError, match="file not found"):
        read_report(tmp_path / "none.json")


def test_a_damaged_reliability_table_is_refused_with_its_line(tmp_path, results):
    path = tmp_path / "reliability.csv"
    write_results(tmp_path, results)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], lines[2].replace("before", "during")]))
    with pytest.raises(CalibrationError, match=r"reliability\.csv:3: when"):
        read_reliability(path)
    path.write_text("\n".join([lines[0], lines[1].rsplit(",", 1)[0]]))
    with pytest.raises(CalibrationError, match=r"reliability\.csv:2: accepted_rate"):
        read_reliability(path)
    path.write_text("position,count\n")
    with pytest.raises(CalibrationError, match=r"reliability\.csv:1: columns"):
        read_reliability(path)
    with pytest.raises(CalibrationError, match="file not found"):
        read_reliability(tmp_path / "none.csv")


def test_a_report_needs_results():
    with pytest.raises(ValidationError, match="results"):
        CalibrationReport(gamma=2, results=())


def test_ece_reported_is_that_of_the_half_not_fitted(results, simulate):
    held_out = simulate(0, lambda u: 2 * u, temperature=0.0, label="greedy_match").split(0)[1]
    calibration = results[0].calibration
    survival = 1 / (1 + np.exp(-held_out.z[:, 0] / calibration.held_out.temperatures[0]))
    assert calibration.held_out.positions[0].ece_after.value == pytest.approx(ece(survival, held_out.survived[:, 0]))


def test_a_drafter_without_confidences_has_no_temperatures_but_a_reason(tmp_path):
    report = write_absence(tmp_path, 4, "the drafter has no confidence head")
    assert read_report(tmp_path / "calibration.json") == report
    assert (report.gamma, report.temperatures, report.absent) == (4, (), "the drafter has no confidence head")
    assert read_reliability(tmp_path / "reliability.csv") == ()
    with pytest.raises(ValidationError, match="or it says why there are none"):
        CalibrationReport(gamma=4)
