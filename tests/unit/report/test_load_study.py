from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))  # load_rounds.py
sys.path.insert(0, str(Path(__file__).parent))  # drawn.py

from drawn import marks, parsed
from load_rounds import comparison

from dspark.config.models import LoadSettings
from dspark.evaluation.load_report import LoadReport, PredictedLoad, PredictedPoint, load_report
from dspark.evaluation.prediction import Prediction
from dspark.report.load_study import gains_table, load_table, load_texts, prediction_table


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(scope="module")
def report() -> LoadReport:
    """Plain decoding and two policies at one and at two requests."""
    comparisons = [
        comparison(1, {"none": [(10, 10)] * 12, "fixed(1)": [(12, 12)] * 12, "scheduled": [(15, 15)] * 12}),
        comparison(2, {"none": [(8, 16)] * 12, "fixed(1)": [(4, 8)] * 12, "scheduled": [(8, 16)] * 12}),
    ]
    predicted = Prediction(tau=1.2, tokens_per_second=20, tokens_per_second_per_user=10, latency_per_token_seconds=0.1,
                           verified_tokens_per_request=1)  # fmt: skip
    points = tuple(
        PredictedPoint(concurrency=one.concurrency, arm=arm.name, predicted=predicted)
        for one in comparisons for arm in one.arms
    )  # fmt: skip
    before = PredictedLoad(made_at="2026-12-01T10:00:00+00:00", build="mine", target="t", gamma=2,
                           settings=LoadSettings(concurrency=(1, 2)), cost_profile="cpu", fitted_on=("a",),
                           measured_on=("b",), points=points)  # fmt: skip
    return load_report("load", before, comparisons)


def test_every_load_and_policy_is_a_row(report: LoadReport):
    texts = load_texts(report)
    study = rows(texts["study.csv"])
    arms = ("none", "fixed(1)", "scheduled")
    assert [(row["concurrency"], row["arm"]) for row in study] == [(load, arm) for load in "12" for arm in arms]
    scheduled = study[2]
    assert float(scheduled["tokens_per_second"]) == pytest.approx(15)
    assert float(scheduled["against_none"]) == pytest.approx(1.5)
    assert float(scheduled["against_best"]) == pytest.approx(15 / 12) and scheduled["best"] == "fixed(1)"
    assert study[5]["best"] == "none"
    assert study[0]["against_none"] == study[0]["against_best"] == ""
    assert float(study[5]["verified_tokens_per_request"]) == 1
    predictions = rows(texts["predictions.csv"])
    assert len(predictions) == 6
    error = float(predictions[0]["tokens_per_second_error"])
    assert error == pytest.approx(20 / float(predictions[0]["tokens_per_second"]) - 1)
    gains = rows(texts["gains.csv"])
    assert len(gains) == len(report.gains)
    matched = next(row for row in gains if (row["arm"], row["against"], row["form"], row["concurrency"]) == (
        "scheduled", "none", "speed_at_matched_throughput", "1"))  # fmt: skip
    assert float(matched["ratio"]) == pytest.approx(1.5)


def test_charts_show_what_the_tables_hold(report: LoadReport):
    """Six points of the frontier; of the budget those that draft, four; of the predictions two for each one."""
    texts = load_texts(report)
    assert {name for name in texts if name.endswith(".svg")} == {"pareto.svg", "budget.svg", "predicted.svg"}
    counts = {name: len(marks(parsed(texts[f"{name}.svg"]))) for name in ("pareto", "budget", "predicted")}
    assert counts["pareto"] >= 6
    assert counts["predicted"] >= 12 and counts["budget"] >= 4


def test_a_terminal_sees_ratios_with_intervals(report: LoadReport):
    header, lines = load_table(report)
    assert len(header) == len(lines[0]) and len(lines) == 6
    assert lines[2][-1] == "1.25 [1.25, 1.25] (fixed(1))" and lines[0][-2:] == ("–", "–")
    header, lines = gains_table(report)
    assert {line[0] for line in lines} == {"scheduled"} and len(header) == len(lines[0])
    by_place = {line[:3]: line[3:] for line in lines}
    # Where plain decoding serves one user, scheduled serves 15 tokens/s of 15; at 10 of one user it still has between
    # its loads: (15 - 10) / (15 - 8) of the way from 15 to 16.
    throughput, speed = by_place["scheduled", "none", "its 1 requests"]
    assert throughput == "1.57 [1.57, 1.57]" and speed == "1.5 [1.5, 1.5]"
    header, lines = prediction_table(report)
    assert len(lines) == 6 and len(header) == len(lines[0])
    assert lines[0][2] == "20" and lines[0][4].startswith(("+", "-"))


def test_what_too_few_rounds_judge_is_said_and_not_shown(report: LoadReport):
    unjudged = tuple(one.model_copy(update={"ratio": None}) for one in report.against_best)
    few = report.model_copy(update={"against_best": unjudged})
    assert load_table(few)[1][2][-1] == "too few rounds to judge (fixed(1))"
    study = rows(load_texts(few)["study.csv"])
    assert (study[2]["against_best"], study[2]["best"]) == ("", "fixed(1)")
