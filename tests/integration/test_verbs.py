"""Every verb in a workspace in which everything was made, called in this process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dspark.cli.boundary import run_command
from dspark.io import progress
from dspark.workspace.process import child_environment

if TYPE_CHECKING:
    from conftest import FakeSandbox


@pytest.fixture
def inside(made: FakeSandbox, monkeypatch: pytest.MonkeyPatch) -> FakeSandbox:
    monkeypatch.chdir(made.root)
    monkeypatch.setattr(progress, "_stop", type(progress._stop)())
    return made


def called(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run_command(list(arguments)) == code, capsys.readouterr().err
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    return json.loads(called(capsys, *arguments, "--json", code=code))


def test_run_shows_what_it_made(inside: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    text = called(capsys, "run", "--target", "fake", "--no-publish")
    assert "fake: 10 stages (10 up to date)" in text
    assert re.search(r"certified in cpu +absent: nothing was measured of ", text)
    assert "tau at temperature 0, mean  1.500 [1.400, 1.600] (n=3)" in text
    assert "lossless" in text and "pass: 1 tokens of 1 prompts, 0 violations" in text
    assert text.splitlines()[1].startswith("Not known whether it pays") and "  cpu: not measured (nothing was" in text
    assert "report   dspark report fake" in text
    assert "package  builds/fake/package" in text
    assert "next     dspark package verify builds/fake/package --digest " in text


def test_run_streams_events(inside: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    inside.write_script("package", "changed")
    out = called(capsys, "run", "--target", "fake", "--no-publish", "--events", "-", "--quiet")
    rows = [json.loads(line) for line in out.splitlines()]
    ended = {row["stage"]: row["status"] for row in rows if row.get("event") == "stage_ended"}
    assert ended["package@fake"] == "ran" and ended["train@fake"] == "up to date"
    assert any(row.get("task") == "package" for row in rows)


def test_run_publishes_what_the_registry_does_not_know(inside: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    """The made-up package is not sound, so the registry refuses it: publishing was reached, with its own exit code."""
    document = as_json(capsys, "run", "--target", "fake", code=7)
    assert "builds/fake/package" in document["error"]
    assert as_json(capsys, "status")["run"]["state"] == "failed"


def test_a_failing_stage_fails_the_run(
    inside: FakeSandbox, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "package")
    inside.write_script("package", "changed")
    document = as_json(capsys, "run", "--target", "fake", "--no-publish", code=4)
    assert document["error"] == "stage package@fake: rows.jsonl:3: no messages"
    assert "mend the line" in document["hint"] and "log: .dspark/runs/" in document["hint"]
    text = called(capsys, "status")
    assert "build fake: failed after" in text and "rows.jsonl:3: no messages" in text


def test_status_and_plan(inside: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    standing = as_json(capsys, "status")
    assert standing["run"]["state"] == "done"
    assert {stage["status"] for stage in standing["stages"]} == {"ran"}
    assert "build fake: done after" in called(capsys, "status")
    text = called(capsys, "plan", "--target", "fake")
    assert text.splitlines()[0].startswith("build fake, target fake, ")
    assert text.count("up to date") == 11
    assert "in the way" not in text
    steps = as_json(capsys, "plan", "--target", "fake", "--set", "export.onnx=true")["steps"]
    acting = {step["name"]: step["action"] for step in steps if step["action"] != "up to date"}
    assert acting["export@fake"] == "will run" and acting["evaluate@fake"] == "may run"


def test_doctor(inside: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert "error" not in called(capsys, "doctor")
    (inside.root / ".dvc/config").write_text("")
    assert "does not say no_scm=true, analytics=false" in called(capsys, "doctor")
    (inside.root / ".dvc/config").unlink()
    (inside.root / ".dvc/tmp/rwlock").write_text("")
    diagnosis = as_json(capsys, "doctor", code=3)
    assert {check["name"] for check in diagnosis["checks"] if check["status"] == "error"} == {
        "dvc settings",
        "dvc file locks",
    }
    mended = called(capsys, "doctor", "--fix", code=3)
    assert "mended: removed file locks of a killed DVC" in mended
    newest = max((inside.root / ".dspark/runs").iterdir())
    (newest / "run.json").write_text("{")
    (inside.root / "dvc.yaml").write_text("stages: [")
    found = {check["name"]: check for check in as_json(capsys, "doctor", code=3)["checks"]}
    assert found["last run"]["status"] == "warning" and "run.json" in found["last run"]["found"]
    assert found["pipeline"]["status"] == "error" and "not valid YAML" in found["pipeline"]["found"]


def test_targets(inside: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fake  fetched  random weights" in called(capsys, "targets", "list")
    shown = as_json(capsys, "targets", "show", "fake")
    assert shown["facts"]["architecture"] == "Qwen3ForCausalLM"
    assert "mask token id" in called(capsys, "targets", "show", "fake")
    assert "targets/fake.json" in called(capsys, "targets", "fetch", "fake")
    called(capsys, "targets", "show", "fak", code=2)
    called(capsys, "targets", "export", "fak", "--out", "out", code=2)
    refused = as_json(capsys, "targets", "export", "fake", "--out", "pipeline", code=2)
    assert "holds something else" in refused["error"] and "not there yet" in refused["hint"]


def test_package(inside: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gamma 7" in called(capsys, "package", "show", "builds/fake/package")
    assert as_json(capsys, "package", "show", "builds/fake/package")["build"] == "fake"
    called(capsys, "package", "show", "builds", code=7)
    called(capsys, "package", "verify", "builds/fake/package", code=7)


def test_status_before_any_run(fake: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    called(capsys, "--workspace", str(fake.root / "pipeline"), "status", code=3)
    assert "nothing was run here yet" in as_json(capsys, "-C", str(fake.root), "status", code=3)["error"]


def test_plots_are_dvc_plots_too(inside: FakeSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures show in `dvc plots show`, and to DVC's stages they are nothing."""
    assert "nothing to draw yet" in as_json(capsys, "plots", "fake", code=3)["error"]
    percentiles = {"p50": 0.1, "p95": 0.2, "p99": 0.3}
    speed = {"value": 5.0, "n": 3, "ci95": [4.0, 6.0]}
    point = {"concurrency": 1, "arm": "none", "policy": "none", "verified_tokens_per_request": 0.0, "on_frontier": True}
    point |= dict.fromkeys(("tokens_per_second", "tokens_per_second_per_user"), speed)
    point |= dict.fromkeys(("ttft_seconds", "itl_seconds"), percentiles)
    pareto = {"schema": "dspark/pareto/1", "dtype": "float32", "threads": 1, "points": [point]}
    (inside.root / "builds/fake/evaluate/pareto.json").write_text(json.dumps(pareto))
    assert list(as_json(capsys, "plots", "fake")["figures"]) == ["pareto"]
    command = [sys.executable, "-m", "dvc", "plots", "show", "--out", "page"]
    environment = child_environment(inside.workspace, None)
    shown = subprocess.run(command, cwd=inside.root, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "pareto.svg" in (inside.root / "page/index.html").read_text()
    (inside.root / "builds/fake/evaluate/pareto.json").unlink()
    assert [stage["status"] for stage in as_json(capsys, "run", "--target", "fake", "--no-publish")["stages"]] == [
        "up to date"
    ] * 10
