"""`@stage`: outputs by one rename, work that survives, results that say what happened."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dspark
from dspark.config.models import ExportSettings
from dspark.config.stages import BY_NAME, ExportInputs
from dspark.errors import DataError
from dspark.io.progress import Progress
from dspark.workspace.inputs import write_inputs
from dspark.workspace.layout import Workspace
from dspark.workspace.results import StageResult, read_result
from dspark.workspace.stage import RUN_ID, StagePaths, _make, remove_finished, run_stage

Main = Callable[[Any, StagePaths, Progress], None]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace in which stage `export` of build `b` can run."""
    corpus = ("corpora/c/features", "corpora/c/responses")
    for folder in ("pipeline", "stages", "targets", "builds/b/train/drafter", *corpus, ".dspark/runs/r1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "dvc.yaml").write_text("")
    (tmp_path / "targets" / "t.json").write_text("{}")
    (tmp_path / "builds/b/train/drafter/model.safetensors").write_text("weights")
    (tmp_path / "corpora/c/features/manifest.json").write_text("{}")
    (tmp_path / "corpora/c/responses/dev.jsonl").write_text("")
    found = Workspace(tmp_path)
    entry = {"target": "t", "corpus": "c", "geometry": "g", "profile": "p"}
    (tmp_path / ".dspark/dag.json").write_text(json.dumps({"builds": {"b": entry}}))
    write_inputs(found, "export", "b", inputs(), "code")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUN_ID, "r1")
    monkeypatch.setattr("dspark.workspace.stage._redirect_output", lambda log: None)
    monkeypatch.setattr("dspark.workspace.stage.install_stop_signals", lambda: None)
    return found


def inputs(opset: int = 20) -> ExportInputs:
    return ExportInputs(build="b", corpus="c", target="t", export=ExportSettings(onnx_opset=opset))


def run(workspace: Workspace, main: Main) -> StageResult:
    code = run_stage("export", "b", main)
    result = read_result(workspace.runs / "r1", "export", "b")
    assert result is not None
    assert result.exit_code == code
    return result


def writes(text: str) -> Main:
    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        (paths.out / "made.txt").write_text(text)

    return main


def test_a_stage_gets_its_settings_and_its_output_appears(workspace: Workspace) -> None:
    seen: list[Any] = []

    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        seen.extend([settings.export.onnx_opset, paths.build, paths.target, paths.corpus])
        (paths.out / "made.txt").write_text("whole")

    result = run(workspace, main)
    root = workspace.root
    assert seen == [20, root / "builds/b", root / "targets/t.json", root / "corpora/c"]
    assert (root / "builds/b/export/made.txt").read_text() == "whole"
    assert (result.status, result.exit_code, result.outputs) == ("ran", 0, ["builds/b/export"])


def test_nothing_appears_when_a_stage_fails_and_the_result_says_why(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        (paths.out / "half.txt").write_text("half")
        raise DataError("prompts.jsonl:3: no messages", "mend the line")

    result = run(workspace, main)
    assert not (workspace.root / "builds/b/export").exists()
    assert (result.status, result.category, result.exit_code) == ("failed", "DataError", 4)
    assert (result.message, result.hint) == ("prompts.jsonl:3: no messages", "mend the line")
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "Error: prompts.jsonl:3: no messages\n  mend the line" in said


def test_a_traceback_is_printed_for_faults_and_on_request_only(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        raise KeyError("x")

    result = run(workspace, fault)
    assert (result.category, result.exit_code) == ("KeyError", 5)
    assert "Traceback" in capsys.readouterr().err

    def expected(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        raise DataError("wrong")

    monkeypatch.setenv("DSPARK_DEBUG", "1")
    run(workspace, expected)
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_library_says_what_to_install(workspace: Workspace) -> None:
    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    assert "pip install" in run(workspace, main).hint


def test_a_stage_that_makes_nothing_fails(workspace: Workspace) -> None:
    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        paths.out.rmdir()

    assert "without making its output" in run(workspace, main).message


def test_resumable_work_is_found_again_with_equal_inputs_and_dropped_on_success(workspace: Workspace) -> None:
    places: list[Path] = []

    def interrupted(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        places.append(paths.work)
        (paths.work / "checkpoint").write_text("step 7")
        (paths.out / "half.txt").write_text("half")
        raise KeyboardInterrupt

    def resumed(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        places.append(paths.work)
        assert (paths.work / "checkpoint").read_text() == "step 7"
        assert list(paths.out.iterdir()) == []
        (paths.out / "made.txt").write_text("whole")

    result = run(workspace, interrupted)
    assert (result.status, result.exit_code) == ("interrupted", 130)
    assert run(workspace, resumed).status == "ran"
    assert places[0] == places[1]
    assert not places[0].exists()


@pytest.mark.parametrize(
    ("name", "kept", "said"),
    [
        ("train", True, "what it kept of its work is still there"),
        ("prompts", False, "it begins again; what other stages finished is not done again"),
        ("features", True, "what it finished is in the store and is not done again"),
        ("responses", False, "what it finished is in the store and is not done again"),
    ],
)
def test_a_stage_that_goes_on_says_what_is_not_lost(
    workspace: Workspace, tmp_path: Path, name: str, kept: bool, said: str
) -> None:
    notes: list[str] = []

    class Notes(Progress):
        def note(self, message: str) -> None:
            notes.append(message)

    folder = tmp_path / "work"
    paths = StagePaths(workspace, BY_NAME[name], "b", {}, out=folder / "out" / name, work=folder / "state")
    for attempt in range(2):
        _make(BY_NAME[name], lambda *_: None, None, paths, Notes())
        if kept and not attempt:
            (paths.work / "step-000007").mkdir()
    assert notes == [f"an earlier {name} was stopped on its way: {said}"]


@pytest.mark.parametrize("change", ["settings", "code", "dependency"])
def test_changed_inputs_start_from_nothing(workspace: Workspace, change: str) -> None:
    places: list[Path] = []

    def interrupted(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        places.append(paths.work)
        raise KeyboardInterrupt

    run(workspace, interrupted)
    if change == "settings":
        write_inputs(workspace, "export", "b", inputs(opset=19), "code")
    elif change == "code":
        write_inputs(workspace, "export", "b", inputs(), "other code")
    else:
        (workspace.root / "builds/b/train/drafter/model.safetensors").write_text("others")
    run(workspace, interrupted)
    assert places[0] != places[1]


def test_a_finished_output_that_dvc_did_not_record_is_put_back_without_working_again(workspace: Workspace) -> None:
    """As after kill -9 between the end of the stage and DVC's lock file: DVC deletes the output and starts again."""
    calls: list[int] = []

    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        calls.append(1)
        (paths.out / "folder").mkdir()
        (paths.out / "folder" / "made.txt").write_text("whole")

    made = workspace.root / "builds/b/export/folder/made.txt"
    run(workspace, main)
    made.unlink()
    made.parent.rmdir()
    made.parent.parent.rmdir()
    run(workspace, main)
    assert made.read_text() == "whole"
    assert calls == [1]
    remove_finished(workspace)
    assert not list(workspace.state.glob("work/*/*"))
    run(workspace, main)
    assert calls == [1, 1]


def test_a_copy_that_does_not_fit_does_not_fail_the_stage(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, destination: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dspark.workspace.finished.copy", full)
    assert run(workspace, writes("whole")).status == "ran"
    assert (workspace.root / "builds/b/export/made.txt").read_text() == "whole"


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "more", "no digest"])
def test_a_kept_output_that_was_damaged_is_made_again(workspace: Workspace, damage: str) -> None:
    """The insurance against kills is believed only byte by byte."""
    calls: list[int] = []

    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        calls.append(1)
        (paths.out / "made.txt").write_text("whole")

    run(workspace, main)
    (kept,) = workspace.state.glob("work/*/*/finished")
    copy = kept / "export/made.txt"
    if damage == "gone":
        copy.unlink()
    elif damage == "more":
        (kept / "export/other.txt").write_text("x")
    elif damage == "no digest":
        (kept / "digest").unlink()
    else:
        copy.write_text({"flipped": "whola", "cut": ""}[damage])
    assert run(workspace, main).status == "ran"
    assert (workspace.root / "builds/b/export/made.txt").read_text() == "whole"
    assert calls == [1, 1] and [path.name for path in (workspace.root / "builds/b/export").iterdir()] == ["made.txt"]


def test_a_stage_on_a_full_disk_says_so_and_makes_room_to_say_it(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        (paths.out / "half.bin").write_bytes(bytes(1000))
        (paths.work / "checkpoint").write_text("step 7")
        raise OSError(errno.ENOSPC, "No space left on device", str(paths.out / "half.bin"))

    result = run(workspace, main)
    assert (result.status, result.category, result.exit_code) == ("failed", "PreflightError", 3)
    assert result.message.endswith("out/export/half.bin: No space left on device") and "make room" in result.hint
    assert "Traceback" not in capsys.readouterr().err
    (state,) = workspace.state.glob("work/*/*")
    assert [path.name for path in state.iterdir()] == ["state"]  # what can be taken up again stays


def test_a_result_that_cannot_be_written_down_is_no_failure(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("dspark.workspace.stage.write_model", full)
    assert run_stage("export", "b", writes("whole")) == 0
    assert (workspace.root / "builds/b/export/made.txt").read_text() == "whole"
    assert "could not be written down" in capsys.readouterr().err


def test_an_old_output_is_replaced_as_a_whole(workspace: Workspace) -> None:
    old = workspace.root / "builds/b/export"
    old.mkdir()
    (old / "old.txt").write_text("old")
    run(workspace, writes("new"))
    assert [path.name for path in old.iterdir()] == ["made.txt"]


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda root: (root / "targets/t.json").unlink(), "targets/t.json is missing"),
        (lambda root: (root / ".dspark/dag.json").write_text("{}"), "no export stage for 'b'"),
        (lambda root: (root / ".dspark/inputs/export/b.json").unlink(), "file not found"),
        (
            lambda root: (root / ".dspark/inputs/export/b.json").write_text(
                '{"schema": "dspark/stage-inputs/1", "stage": "export", "key": "b", "settings": {"x": 1}, "code": ""}'
            ),
            "x: Extra inputs",
        ),
    ],
)
def test_missing_or_foreign_inputs_are_named(workspace: Workspace, break_it: Callable[[Path], None], said: str) -> None:
    break_it(workspace.root)
    result = run(workspace, writes("x"))
    assert result.status == "failed"
    assert said in result.message


SCRIPT = """
import sys, time
from pathlib import Path
from dspark.workspace.stage import stage

@stage("export")
def main(inputs, paths, progress):
    print("printed by the stage")
    progress.start("work", 1000)
    Path(sys.argv[0]).with_suffix(".started").touch()
    for _ in range(1000):
        time.sleep(0.01)
        progress.advance()

if __name__ == "__main__":
    main()
"""


def start(workspace: Workspace, owner: int) -> subprocess.Popen[bytes]:
    script = workspace.root / "stages" / "export_drafter.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(dspark.__file__).parent.parent),
        "DSPARK_RUN_ID": "r1",
        "DSPARK_RUN_PID": str(owner),
        "DSPARK_EVENTS": str(workspace.runs / "r1" / "events.jsonl"),
    }
    child = subprocess.Popen([sys.executable, "-P", str(script), "b"], cwd=workspace.root, env=environment)
    deadline = time.monotonic() + 30
    while not script.with_suffix(".started").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.02)
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_a_safe_point(workspace: Workspace, number: signal.Signals) -> None:
    child = start(workspace, os.getpid())
    child.send_signal(number)
    assert child.wait(timeout=20) == 130
    result = read_result(workspace.runs / "r1", "export", "b")
    assert result is not None and result.status == "interrupted"
    assert "printed by the stage" in (workspace.runs / "r1" / "export@b.log").read_text()
    rows = [json.loads(line) for line in (workspace.runs / "r1" / "events.jsonl").read_text().splitlines()]
    assert rows[0]["stage"] == "export@b" and rows[0]["total"] == 1000


def test_a_stage_whose_run_was_killed_stops_by_itself(workspace: Workspace) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    child = start(workspace, owner.pid)
    owner.kill()
    owner.wait()
    assert child.wait(timeout=20) == 130


def test_of_many_processes_only_the_first_leaves_output_and_result(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun all of them run `main`; once there is a finished copy, none of them does."""
    ranks: list[str] = []

    def main(settings: ExportInputs, paths: StagePaths, progress: Progress) -> None:
        ranks.append(os.environ["RANK"])
        if os.environ["RANK"] == "0":
            (paths.out / "made.txt").write_text("whole")

    monkeypatch.setenv("RANK", "1")
    assert run_stage("export", "b", main) == 0
    assert not (workspace.root / "builds/b/export").exists()
    assert read_result(workspace.runs / "r1", "export", "b") is None
    monkeypatch.setenv("RANK", "0")
    assert run(workspace, main).status == "ran"
    assert (workspace.root / "builds/b/export/made.txt").read_text() == "whole"
    monkeypatch.setenv("RANK", "1")
    assert run_stage("export", "b", main) == 0
    assert ranks == ["1", "0"]
