"""What the end of a run says that no other line of it would."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.cli.run import show
from dspark.config.models import Build, DrafterSettings, TargetSpec
from dspark.io.jsonfile import write_model
from dspark.profiling.cost import CostReport, CostRow, curve_fields
from dspark.report.verdict import Verdict
from dspark.workspace.run import Report
from dspark.workspace.summary import Summary, lacking

PROFILE = "reference-cpu"


def build(**drafter: object) -> Build:
    source = {"kind": "random", "seed": 0, "config": {}}
    return Build.model_construct(
        name="b",
        target=TargetSpec.model_construct(name="t", source=source),
        drafter=DrafterSettings.model_validate(drafter),
        serving_profiles=(PROFILE,),
    )


def profiled(folder: Path, seconds: tuple[float, float, float]) -> None:
    """A cost report of steps of 1, 4 and 8 tokens that took so long, each of one request."""
    rows = [
        CostRow(requests=1, verify_tokens=tokens, context=64, draft_seconds=0.0, verify_seconds=took,
                step_seconds=took, n=5, ci95=(took, took))
        for tokens, took in zip((1, 4, 8), seconds, strict=True)
    ]  # fmt: skip
    report = CostReport(
        profile=PROFILE, target="t", target_digest="0" * 64, geometry="g", gamma=3, dtype="float32", threads=1,
        draft_backend="torch", warmup=2, repeats=5, fingerprint={}, rows=tuple(rows), plain=(), drafting=(),
        **curve_fields(rows, 8),
    )  # fmt: skip
    write_model(folder / "scheduler/cost" / f"{PROFILE}.json", report)


def test_a_flat_curve_is_said_with_its_profile_and_what_it_costs(tmp_path: Path) -> None:
    """Noise made the smallest step the slowest: falling seconds pool to one mean, 2 steps per second."""
    profiled(tmp_path, (0.6, 0.5, 0.4))
    (note,) = lacking(tmp_path, build())
    assert "serving profile reference-cpu: cost curve: flat, 2 steps per second" in note
    assert "no scheduler" in note and "serving_profiles/reference-cpu.yaml" in note


@pytest.mark.parametrize("case", ["a curve", "no confidences", "not profiled"])
def test_where_nothing_is_lacking_nothing_is_said(tmp_path: Path, case: str) -> None:
    if case != "not profiled":
        profiled(tmp_path, (0.1, 0.2, 0.3) if case == "a curve" else (0.6, 0.5, 0.4))
    assert list(lacking(tmp_path, build(confidence=case != "no confidences"))) == []


def test_the_note_is_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    found = Summary("b", "p", "d", "m", Verdict("leave off", "It does not pay", ()), (), ("flat",))
    show(Report(run="r", build="b", target="t", seconds=1.0, stages=(), summary=found))
    assert "note     flat" in capsys.readouterr().out.splitlines()
