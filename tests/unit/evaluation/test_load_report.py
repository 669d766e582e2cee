from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # load_rounds.py

from load_rounds import comparison

from dspark.config.models import LoadSettings
from dspark.errors import DataError
from dspark.evaluation.load_report import LoadReport, PredictedLoad, PredictedPoint, load_report
from dspark.evaluation.prediction import Prediction
from dspark.io.jsonfile import read_model, write_model


def point(concurrency: int, arm: str, throughput: float, latency: float) -> PredictedPoint:
    predicted = Prediction(tau=1.5, tokens_per_second=throughput, tokens_per_second_per_user=1 / latency,
                           latency_per_token_seconds=latency, verified_tokens_per_request=1)  # fmt: skip
    return PredictedPoint(concurrency=concurrency, arm=arm, predicted=predicted)


def predicted(*points: PredictedPoint) -> PredictedLoad:
    return PredictedLoad(made_at="2026-12-01T10:00:00+00:00", build="b", target="t", gamma=2,
                         settings=LoadSettings(concurrency=(2,)), cost_profile="cpu", fitted_on=("a",),
                         measured_on=("b",), points=points)  # fmt: skip


# Of four groups of prompts rounds 0, 1, 6, 7, 8 and 9 choose. fixed(2) is the fastest in these and the slowest in those
# that judge.
ROUNDS = comparison(
    2,
    {
        "none": [(8, 16)] * 12,
        "fixed(1)": [(10, 20)] * 12,
        "fixed(2)": [(20, 40) if number in (0, 1, 6, 7, 8, 9) else (5, 10) for number in range(12)],
        "scheduled": [(10, 20)] * 12,
    },
)


def test_predictions_stand_beside_what_was_measured_after_the_prefill():
    """A round of two answers of 11 tokens at 16 tokens/s lasts 22 / 16 s, half of it prefill: 20 tokens in 0.6875 s.
    Predicted 32 instead, 10 % too much; latency 1 / 8 s."""
    speed = 20 / 0.6875
    before = predicted(point(2, "none", 1.1 * speed, 0.1), point(2, "scheduled", 30, 0.1))
    report = load_report("load", before, [ROUNDS])
    plain, scheduled = report.compared
    assert plain.tokens_per_second.value == pytest.approx(speed)
    assert plain.tokens_per_second_error == pytest.approx(0.1)
    assert plain.latency_per_token_seconds.value == pytest.approx(1 / 8)
    assert plain.latency_per_token_error == pytest.approx(0.1 * 8 - 1)
    assert plain.tau == pytest.approx(1)
    error = 30 / (20 / (22 / 20 / 2)) - 1
    assert scheduled.tokens_per_second_error == pytest.approx(error)
    assert report.median_tokens_per_second_error == pytest.approx((0.1 + abs(error)) / 2)
    assert report.median_latency_per_token_error == pytest.approx((0.2 + 0) / 2)


def test_the_best_fixed_length_is_judged_on_rounds_that_had_no_part_in_its_choice():
    report = load_report("load", predicted(point(2, "none", 1, 1)), [ROUNDS])
    (one,) = report.against_best
    assert (one.arm, one.best, one.concurrency) == ("scheduled", "fixed(2)", 2)
    assert one.ratio is not None and one.ratio.value == pytest.approx(2)


def test_few_rounds_name_the_best_fixed_length_and_judge_nothing():
    few = comparison(2, {"none": [(8, 16)] * 8, "fixed(1)": [(10, 20)] * 8, "scheduled": [(30, 60)] * 8})
    (one,) = load_report("load", predicted(point(2, "none", 1, 1)), [few]).against_best
    assert (one.best, one.ratio) == ("fixed(1)", None)


def test_gains_are_against_plain_decoding_and_one_draft():
    report = load_report("load", predicted(point(2, "none", 1, 1)), [ROUNDS], slas=[4.0], absent={"x": "no"})
    pairs = {(one.arm, one.against) for one in report.gains}
    assert pairs == {("fixed(1)", "none"), ("fixed(2)", "none"), ("scheduled", "none"), ("fixed(2)", "fixed(1)"),
                     ("scheduled", "fixed(1)")}  # fmt: skip
    assert {one.level for one in report.gains if one.concurrency is None} == {4.0}
    assert report.absent == {"x": "no"}
    (one,) = report.loads
    ratio = one.arms["scheduled"].against_none
    assert ratio is not None and ratio.value == pytest.approx(1.25)


def test_a_report_is_read_back(tmp_path: Path):
    report = load_report("load", predicted(point(2, "none", 1, 1)), [ROUNDS])
    write_model(tmp_path / "study.json", report)
    assert read_model(tmp_path / "study.json", LoadReport) == report


def test_what_was_predicted_and_not_measured_is_refused():
    with pytest.raises(DataError, match="none at 4 requests was predicted and not measured"):
        load_report("load", predicted(point(4, "none", 1, 1)), [ROUNDS])
