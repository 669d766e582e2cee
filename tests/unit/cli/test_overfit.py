"""`dspark overfit`: what is printed and how it ends. The gate itself is tested where it is."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.cli.boundary import run_command
from dspark.evaluation.overfit import OverfitReport

REACHED = {"greedy_match": [1.0, 0.995], "accepted": [0, 1, 19]}
UNLEARNED = {"greedy_match": [0.6, 0.25], "accepted": [12, 4, 4]}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the gate will report; `asked` is what it was asked."""
    fields: dict[str, Any] = {}

    def gate(workspace: object, resolved: object, listener: object, **asked: Any) -> OverfitReport:
        fields["asked"] = asked
        return OverfitReport(
            target="t",
            geometry="dspark-g2-l1-r4-v40",
            gamma=2,
            sequences=8,
            response_tokens=300,
            steps=120,
            seconds=4.5,
            cycles=20,
            tokens_per_cycle=2.95,
            equal_answers=8,
            wanted_share=asked["share"],
            **fields["report"],
        )

    monkeypatch.setattr("dspark.cli.overfit.workspace_of", lambda context: None)
    monkeypatch.setattr("dspark.workspace.run.resolve_request", lambda *_: SimpleNamespace(chosen=None))
    monkeypatch.setattr("dspark.workspace.overfit.overfit_target", gate)
    return fields


def test_a_gate_that_is_reached_ends_well(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found["report"] = REACHED
    assert run_command(["overfit", "--target", "t", "--quiet", "--steps", "150", "--sequences", "4"]) == 0
    assert found["asked"] == {"sequences": 4, "steps": 150, "learning_rate": 0.01, "new_tokens": 48, "share": 0.9}
    out = capsys.readouterr().out
    assert "0: 0  1: 1  2: 19  (20 blocks of 2)" in out
    assert "95.0%, 90% are asked for" in out
    assert "2.95 of 3" in out


def test_a_gate_that_is_not_reached_ends_with_5(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found["report"] = UNLEARNED
    assert run_command(["overfit", "--target", "t", "--quiet"]) == 5
    shown = capsys.readouterr()
    assert "verdict                    not reached" in shown.out
    assert "Error: target t: 4 of 20 blocks were accepted whole: after 120 steps the drafter has only 25%" in shown.err


def test_the_report_can_be_had_as_json(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found["report"] = REACHED
    assert run_command(["overfit", "--target", "t", "--quiet", "--json", "--share", "0.95"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dspark/overfit/1"
    assert (document["accepted"], document["wanted_share"]) == ([0, 1, 19], 0.95)
