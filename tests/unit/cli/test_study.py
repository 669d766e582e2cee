"""What `dspark evaluate --study` prints of a load; tests/integration has whole studies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))  # load_rounds.py

from load_rounds import comparison

from dspark.cli.boundary import run_command
from dspark.config.models import LoadSettings
from dspark.evaluation.load_report import PredictedLoad, PredictedPoint, load_report
from dspark.evaluation.prediction import Prediction
from dspark.workspace.run import Report
from dspark.workspace.study import Studied


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What was asked of the study."""
    seen: dict[str, Any] = {}
    rounds = comparison(1, {"none": [(10, 10)] * 12, "scheduled": [(15, 15)] * 12})
    predicted = Prediction(tau=1.5, tokens_per_second=33, tokens_per_second_per_user=15,
                           latency_per_token_seconds=1 / 15, verified_tokens_per_request=1)  # fmt: skip
    before = PredictedLoad(made_at="2026-12-01T10:00:00+00:00", build="mine", target="t", gamma=2,
                           settings=LoadSettings(concurrency=(1,)), cost_profile="cpu", fitted_on=("a",),
                           measured_on=("b",),
                           points=(PredictedPoint(concurrency=1, arm="scheduled", predicted=predicted),))  # fmt: skip
    report = load_report("load", before, [rounds], absent={"threshold(0.5)": "the drafter has no confidence head"})

    def study(workspace: Any, request: Any, name: str, listener: Any) -> Studied:
        seen.update(build=request.build, name=name)
        run = Report(run="r", build="mine", target="t", seconds=1.0, stages=(), summary=None)
        return Studied(run, report, tmp_path, ("study.json", "pareto.svg"))

    monkeypatch.setattr("dspark.cli.evaluate.workspace_of", lambda context: SimpleNamespace(root=tmp_path))
    monkeypatch.setattr("dspark.workspace.study.study", study)
    return seen


def test_a_load_is_shown_with_its_predictions_and_what_is_missing(asked: dict[str, Any], capsys: Any, tmp_path: Path):
    """11 tokens at 15 tokens/s, half of it prefill: 10 tokens in 11 / 30 s, 27.3 tokens/s; 33 were predicted."""
    assert run_command(["evaluate", "--study", "load", "--build", "mine", "--quiet"]) == 0
    assert asked == {"build": "mine", "name": "load"}
    out = capsys.readouterr().out
    assert "1.5 [1.5, 1.5] (none)" in out
    assert "not measured: policy threshold(0.5) (the drafter has no confidence head)" in out
    assert "+21.0%" in out and "predictions of 1 points are off by 21.0% in tokens/s and 0.0%" in out
    assert out.splitlines()[-1].endswith("pareto.svg")


def test_one_document(asked: dict[str, Any], capsys: Any):
    assert run_command(["evaluate", "--study", "load", "--build", "mine", "--quiet", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dspark/load-study/1" and document["files"] == ["study.json", "pareto.svg"]
