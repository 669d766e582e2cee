"""The command line: quick to answer, every error in one form, every failure its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from dspark import errors
from dspark.cli import boundary, root
from dspark.cli.boundary import run_command
from dspark.config.stages import STAGES
from dspark.io.jsonfile import write_model
from dspark.workspace.results import RunRecord, StageResult, result_path, write_record

CHECKOUT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "transformers", "accelerate", "mlflow", "dvc", "onnx", "onnxruntime", "numpy", "rich"}


def loaded_by(statement: str) -> set[str]:
    """Heavy modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import dspark",
        "from dspark.cli.boundary import run_command; run_command(['--help'])",
        "from dspark.cli.boundary import run_command; run_command(['run', '--help'])",
        "from dspark.cli.boundary import run_command; run_command(['version'])",
        "import dspark.workspace.plan, dspark.workspace.status",
    ],
)
def test_nothing_heavy_is_loaded(statement: str) -> None:
    assert loaded_by(statement) - {"numpy"} == set()


def test_help_answers_within_the_bar() -> None:
    """0.25 s on a quiet machine; the best of five, since the machine that tests run on is shared."""
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "dspark", "--help"], capture_output=True, check=True)
        seconds.append(time.monotonic() - start)
    assert min(seconds) <= 0.25


def test_status_answers_within_the_bar(tmp_path: Path) -> None:
    """0.8 s, of a whole run whose every stage has ended; the best of five."""
    for name in ("dvc.yaml", "pipeline", "stages"):
        (tmp_path / name).mkdir()
    run = tmp_path / ".dspark/runs/1"
    run.mkdir(parents=True)
    stages = [f"{stage.name}@b" for stage in STAGES]
    write_record(run, RunRecord(id="1", build="b", pid=1, started=1.0, finished=2.0, state="done", stages=stages))
    for stage in STAGES:
        write_model(
            result_path(run, stage.name, "b"), StageResult(stage=stage.name, key="b", status="ran", seconds=1.0)
        )
    (run / "dvc.log").write_text("".join(f"Running stage '{name}':\n" for name in stages))
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        command = [sys.executable, "-m", "dspark", "-C", str(tmp_path), "status"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(time.monotonic() - start)
        assert done.stdout.count("  ran  ") == len(stages)
    assert min(seconds) <= 0.8


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in root.VERBS:
        assert f"\n  {verb}" in out


@pytest.mark.parametrize("verb", sorted(root.VERBS))
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([verb, "--help"]) == 0
    assert f"Usage: dspark {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "first", "second"),
    [
        (["rn"], "Error: dspark has no verb 'rn'", "did you mean 'run'?"),
        (["targets", "lst"], "Error: dspark targets has no verb 'lst'", "did you mean 'list'?"),
        (["package", "verfy", "x"], "Error: dspark package has no verb 'verfy'", "did you mean 'verify'?"),
        (
            ["verify", "x"],
            "Error: dspark has no verb 'verify'",
            "did you mean 'dspark store verify' or 'dspark package verify'?",
        ),
        (["xyz"], "Error: dspark has no verb 'xyz'", "all verbs: dspark --help"),
    ],
)
def test_an_unknown_verb_suggests_the_one_that_was_meant(
    arguments: list[str], first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == first
    assert lines[1].startswith("  ") and second in lines[1]


@pytest.mark.parametrize("arguments", [["run", "--nope"], ["package", "verify"], ["run", "--json", "--events", "-"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) == 2
    assert capsys.readouterr().err.startswith("Error: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SettingsError("m", "h"), 2),
        (errors.PreflightError("m", "h"), 3),
        (errors.DataError("m", "h"), 4),
        (errors.StageError("m", "h"), 5),
        (errors.GateError("m", "h"), 6),
        (errors.IntegrityError("m", "h"), 7),
        (errors.ServiceError("m", "h"), 8),
    ],
)
def test_each_error_has_its_exit_code_and_form(
    error: errors.DsparkError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raises(monkeypatch, error)
    assert run_command(["version", "--json"]) == code
    out, err = capsys.readouterr()
    assert err == "Error: m\n  h\n"
    assert json.loads(out) == {"schema": "dspark/error/1", "error": "m", "hint": "h", "exit_code": code}


def test_a_hint_of_several_lines_is_indented_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raises(monkeypatch, errors.PreflightError("m", "one\ntwo"))
    assert run_command(["version"]) == 3
    assert capsys.readouterr().err == "Error: m\n  one\n  two\n"


@pytest.mark.parametrize("stop", [errors.Interrupted("stopped"), KeyboardInterrupt(), click.Abort()])
def test_a_stop_is_130_and_says_how_to_go_on(
    stop: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raises(monkeypatch, stop)
    assert run_command(["version"]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err


def test_a_stop_while_modules_are_loaded_is_one_too(tmp_path: Path) -> None:
    """click is the first that is loaded; this one is stopped in the middle of it."""
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "dspark", "version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT)])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_a_verb_that_has_verbs_shows_them_when_it_is_given_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["package"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("Usage: dspark package") and "verify" in told and "Error" not in told


def test_tracebacks_are_shown_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raises(monkeypatch, errors.DataError("m"))
    run_command(["version"])
    assert "Traceback" not in capsys.readouterr().err
    run_command(["--debug", "version"])
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_is_told_from_a_users_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raises(monkeypatch, ZeroDivisionError("division by zero"))
    assert run_command(["version"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Error: ZeroDivisionError: division by zero\n")
    assert "report" in err and "Traceback" not in err


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m dspark doctor --json | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["run", "--target", "tiny"], ["plan", "--target", "tiny"], ["status"], ["targets", "list"]],
)
def test_outside_a_workspace_the_way_in_is_shown(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(arguments) == 3
    lines = capsys.readouterr().err.splitlines()
    assert "is not inside a workspace" in lines[0]
    assert "--workspace" in lines[1]


def test_a_plan_shows_every_setting_and_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CHECKOUT)
    asked = ["plan", "--target", "tiny", "--settings", "--set", "training.steps=7"]
    assert run_command([*asked, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["training.steps"] == {"value": 7, "from": "--set training.steps=7"}
    assert run_command(asked) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["training.steps", "7", "--set training.steps=7"] in lines
    assert len(lines) == 1 + len(settings)


def test_version_and_doctor_work_outside_a_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dspark"] == __import__("dspark").__version__
    assert run_command(["doctor"]) == 0
    assert "not in a workspace" in capsys.readouterr().out


def raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `dspark version` raise."""

    def failing() -> dict[str, str]:
        raise error

    stand_in: Callable[[], dict[str, str]] = failing
    monkeypatch.setattr("dspark.workspace.versions.versions", stand_in)
    assert boundary.run_command is run_command
