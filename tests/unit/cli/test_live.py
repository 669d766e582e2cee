"""`dspark live`: what it asks for, what it prints and how it ends. The replay itself is tested where it is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.cli.boundary import run_command
from dspark.config.models import LiveLoadSettings
from dspark.evaluation.live_report import LiveArm, LiveInterval, LiveRatios, LiveReport, MeasuredPercentiles
from dspark.measured import Measured


def measured(value: float) -> Measured:
    return Measured(value=value, n=3, ci95=(value / 2, value * 2))


def arm(name: str, speed: float, **against: LiveRatios) -> LiveArm:
    latency = MeasuredPercentiles(p50=measured(0.1), p95=measured(0.2), p99=measured(0.3))
    interval = LiveInterval(seconds=0.0, arrivals_per_second=1.0, concurrency=measured(2.0), waiting=0.0,
                            tokens_per_second=measured(speed), verified_tokens_per_second=measured(1.0),
                            verified_tokens_per_request=None)  # fmt: skip
    return LiveArm(policy=name, tokens_per_second=measured(speed), verified_tokens_per_second=measured(30.0), busy=0.5,
                   ttft_seconds=latency, itl_seconds=latency, seconds_per_token=measured(0.4), against=against,
                   timeline=(interval,))  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What was asked of the replay."""
    seen: dict[str, Any] = {}
    ratios = LiveRatios(tokens_per_second=measured(1.5), ttft_p95=measured(1.0), itl_p95=measured(1.0),
                        seconds_per_token=measured(1.0))  # fmt: skip

    def live_load_of(workspace: Any, build: str, settings: LiveLoadSettings, listener: Any, **rest: Any) -> Any:
        seen.update(build=build, settings=settings, **rest)
        report = LiveReport(
            settings=settings, seconds=40.0, requests_per_second=(0.5, 4.0), requests=300, slots=32, gamma=4,
            dtype="float32", threads=2, best_fixed="fixed(2)", selection_seconds_per_token={"fixed(2)": 0.4},
            arms={"none": arm("none", 20.0, **{"fixed(2)": ratios}), "fixed(2)": arm("fixed(2)", 30.0)},
        )  # fmt: skip
        return report, tmp_path / "found"

    chosen = SimpleNamespace(chosen=SimpleNamespace(build=SimpleNamespace(name="mine")))
    monkeypatch.setattr("dspark.cli.live.workspace_of", lambda context: SimpleNamespace(root=tmp_path))
    monkeypatch.setattr("dspark.workspace.run.resolve_request", lambda *_: chosen)
    monkeypatch.setattr("dspark.workspace.live.live_load_of", live_load_of)
    return seen


def test_a_load_is_declared_in_a_file_and_every_arm_is_a_line(asked: dict[str, Any], tmp_path: Path, capsys: Any):
    load = tmp_path / "load.yaml"
    load.write_text("requests: 200\npeak: 8\npolicies: [scheduled]\nsampling: {temperature: 1.0, top_p: 0.9}\n")
    words = ["live", "--target", "t", "--load", str(load), "--rival", "mtp1", "--out", str(tmp_path / "out"), "--quiet"]
    assert run_command(words) == 0
    settings = asked["settings"]
    assert (settings.requests, settings.peak, settings.policies) == (200, 8, ("scheduled",))
    assert settings.sampling.top_p == 0.9
    assert (asked["build"], asked["rivals"], asked["out"]) == ("mine", ("mtp1",), tmp_path / "out")
    out = capsys.readouterr().out
    assert "0.5 to 4 and back requests/s for 40 s, 10 rounds, 300 requests, 32 slots" in out
    assert "fixed(2) of 4" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "20 [10, 40]" in lines["none"] and "1.5 [0.75, 3]" in lines["none"] and "1.5" not in lines["fixed(2)"]
    assert str(tmp_path / "found") in out


def test_one_document(asked: dict[str, Any], capsys: Any):
    assert run_command(["live", "--build", "b", "--quiet", "--json"]) == 0
    assert asked["settings"] == LiveLoadSettings()
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dspark/live-load/1" and LiveReport.model_validate(document).best_fixed == "fixed(2)"


def test_mistakes_in_the_file_are_told_with_their_lines(asked: dict[str, Any], tmp_path: Path, capsys: Any):
    load = tmp_path / "load.yaml"
    load.write_text("peak: 0\nround: 4\n")
    assert run_command(["live", "--target", "t", "--load", str(load), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert "load.yaml:1: peak" in told
    assert "load.yaml:2: unknown key 'round'" in told and "did you mean 'rounds'?" in told
    assert run_command(["live", "--target", "t", "--load", str(tmp_path / "none.yaml"), "--quiet"]) == 2
    assert not asked
