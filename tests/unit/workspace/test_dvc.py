"""What DVC's output and the stages' results say about a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.io.jsonfile import write_model
from dspark.workspace.dvc import Tail, Watcher, _reasons, invalid_pipeline, prepare_cache, repro_command
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Outcome
from dspark.workspace.results import StageResult, result_path

# As DVC 3.67 prints it.
OUTPUT = """\
Stage 'prompts@b' didn't change, skipping
Stage 'responses@b' is cached - skipping run, checking out outputs
Updating lock file 'dvc.lock'

Running stage 'features@b':
> python -P stages/extract_features.py 'b'
Updating lock file 'dvc.lock'

Running stage 'train@b':
> python -P stages/train_drafter.py 'b'
ERROR: failed to reproduce 'train@b': failed to run: python -P stages/train_drafter.py 'b', exited with {code}
"""
STAGES = ["prompts@b", "responses@b", "features@b", "train@b", "package@b"]


class Recorder:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def stage_started(self, name: str) -> None:
        self.told.append(("started", name))

    def stage_progress(self, row: dict[str, Any]) -> None:
        self.told.append(("progress", row["done"]))

    def stage_ended(self, outcome: Outcome) -> None:
        self.told.append(("ended", (outcome.name, outcome.status)))

    def note(self, message: str) -> None:
        self.told.append(("note", message))


def result(run: Path, name: str, **fields: Any) -> None:
    stage, _, key = name.partition("@")
    write_model(result_path(run, stage, key), StageResult(stage=stage, key=key, **fields))


def test_every_way_in_which_a_stage_ends_is_told_apart(tmp_path: Path) -> None:
    recorder = Recorder()
    watcher = Watcher(tmp_path, STAGES, recorder)
    result(tmp_path, "features@b", status="ran", seconds=3.5)
    result(tmp_path, "train@b", status="failed", seconds=1.0, message="no", hint="do", exit_code=4)
    (tmp_path / "dvc.log").write_text(OUTPUT.format(code=4))
    outcomes = {outcome.name: outcome for outcome in watcher.finish("failed")}
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "prompts@b": "up to date",
        "responses@b": "restored",
        "features@b": "ran",
        "train@b": "failed",
        "package@b": "not reached",
    }
    assert outcomes["features@b"].seconds == 3.5
    assert (outcomes["train@b"].message, outcomes["train@b"].hint, outcomes["train@b"].exit_code) == ("no", "do", 4)
    assert [event for event in recorder.told if event[0] == "started"] == [
        ("started", "features@b"),
        ("started", "train@b"),
    ]


@pytest.mark.parametrize(("code", "said"), [(137, "it was killed"), (-9, "it was killed"), (1, "exit code 1")])
def test_a_stage_that_left_no_result_is_told_by_its_exit_code(tmp_path: Path, code: int, said: str) -> None:
    watcher = Watcher(tmp_path, STAGES, Recorder())
    (tmp_path / "dvc.log").write_text(OUTPUT.format(code=code))
    outcomes = {outcome.name: outcome for outcome in watcher.finish("failed")}
    assert outcomes["train@b"].status == "failed"
    assert said in outcomes["train@b"].message
    assert outcomes["train@b"].exit_code == 5


def test_what_short_stages_reported_between_two_looks_is_told_before_they_end(tmp_path: Path) -> None:
    recorder = Recorder()
    watcher = Watcher(tmp_path, STAGES, recorder)
    result(tmp_path, "features@b", status="ran", seconds=0.1)
    (tmp_path / "dvc.log").write_text("Running stage 'features@b':\nRunning stage 'train@b':\n")
    rows = [{"stage": "features@b", "done": 7}, {"stage": "train@b", "done": 0}, {"stage": "package@b", "done": 5}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    watcher.tick()
    told = [("started", "features@b"), ("progress", 7), ("ended", ("features@b", "ran"))]
    assert recorder.told == [*told, ("started", "train@b"), ("progress", 0)]
    # The log may lag behind the events: what it has not shown yet is kept.
    result(tmp_path, "train@b", status="ran", seconds=0.1)
    with (tmp_path / "dvc.log").open("a") as handle:
        handle.write("Running stage 'package@b':\n")
    watcher.tick()
    assert recorder.told[-3:] == [("ended", ("train@b", "ran")), ("started", "package@b"), ("progress", 5)]


def test_progress_of_the_running_stage_is_passed_on_and_half_lines_wait(tmp_path: Path) -> None:
    recorder = Recorder()
    watcher = Watcher(tmp_path, STAGES, recorder)
    (tmp_path / "dvc.log").write_text("Running stage 'train@b':\n")
    row = json.dumps({"stage": "train@b", "done": 1})
    (tmp_path / "events.jsonl").write_text(f"{json.dumps({'stage': 'other@b', 'done': 9})}\n{row}\n{row[:5]}")
    watcher.tick()
    assert recorder.told == [("started", "train@b"), ("progress", 1)]
    with (tmp_path / "events.jsonl").open("a") as handle:
        handle.write(row[5:] + "\n")
    watcher.tick()
    assert recorder.told[-1] == ("progress", 1)
    assert len(recorder.told) == 3


def test_a_tail_begins_where_the_file_ends_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert Tail(path).lines() == []
    path.write_text("old\n")
    late, whole = Tail(path), Tail(path, whole=True)
    with path.open("a") as handle:
        handle.write("new\n")
    assert late.lines() == ["new"]
    assert whole.lines() == ["old", "new"]


def test_reasons_of_dvc_status_are_put_in_words() -> None:
    changes = [
        {
            "changed deps": {
                ".dspark/inputs/train/b.json": "modified",
                ".dspark/fingerprints/cpu.json": "modified",
                "targets/t.json": "deleted",
                "corpora/c/features/manifest.json": "deleted",
                "builds/b/train/drafter": "modified",
            }
        },
        {"changed outs": {"builds/b/train": "deleted", "builds/b/export": "modified"}},
        "changed command",
    ]
    assert _reasons(changes) == [
        "its settings or code changed",
        "the machine or a library version changed",
        "the target is not fetched yet",
        "corpora/c/features/manifest.json is not made yet",
        "builds/b/train/drafter changed",
        "output is not made yet: builds/b/train",
        "output modified: builds/b/export",
        "changed command",
    ]


def test_dvc_waits_for_locks_and_its_databases_are_private(tmp_path: Path) -> None:
    assert "--wait-for-lock" in repro_command(["package@b"])
    workspace = Workspace(tmp_path)
    (tmp_path / ".dspark/dvc").mkdir(parents=True, mode=0o777)
    prepare_cache(workspace)
    assert (workspace.dvc_cache.stat().st_mode & 0o777) == 0o700


def test_work_in_this_process_shows_only_once_it_has_a_size() -> None:
    recorder = Recorder()
    progress = ListenedProgress(recorder, "publish")
    progress.end(1.0)
    assert recorder.told == []
    progress.start("publish", 2)
    progress.advance()
    progress.note("a word")
    progress.start("more", 2)
    progress.end(1.0)
    assert recorder.told == [
        ("started", "publish"),
        ("progress", 1),
        ("note", "a word"),
        ("ended", ("publish", "ran")),
    ]


def test_what_dvc_finds_wrong_with_its_file_is_named_with_the_line() -> None:
    """As DVC 3.67 prints it."""
    said = """'./dvc.yaml' validation failed: 2 errors.

extra keys not allowed, in stages -> prompts -> do -> cnd, line 10, column 7
    9 │   do:
   10 │     cnd: x
"""
    found = invalid_pipeline(said)
    assert found is not None and found.exit_code == 3
    assert found.message == "dvc.yaml:10: extra keys not allowed, in stages -> prompts -> do -> cnd"
    assert "git checkout dvc.yaml" in found.hint
    assert invalid_pipeline("ERROR: unable to get the lock: line 3, column 4") is None
