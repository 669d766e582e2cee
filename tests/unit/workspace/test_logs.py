"""What a stage printed, found by its name and followed while it runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dspark.cli.boundary import run_command
from dspark.errors import PreflightError, SettingsError
from dspark.io.jsonfile import write_model
from dspark.workspace.layout import Workspace
from dspark.workspace.logs import contents, log_of, logs
from dspark.workspace.results import RunRecord, StageResult, result_path, write_record


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for name in ("dvc.yaml", "pipeline", "stages"):
        (tmp_path / name).mkdir()
    return Workspace(tmp_path)


def run(workspace: Workspace, name: str, pid: int = 1, state: str = "done", **printed: str) -> Path:
    """A run that left logs; `certify_a` is `certify@a`."""
    folder = workspace.runs / name
    folder.mkdir(parents=True)
    write_record(folder, RunRecord(id=name, build="b", pid=pid, started=1.0, state=state))
    for number, (stage, text) in enumerate(printed.items()):
        path = folder / f"{stage.replace('_', '@')}.log"
        path.write_text(text)
        os.utime(path, (number, number))
    return folder


def text_of(workspace: Workspace, stage: str, **asked: int) -> str:
    return b"".join(contents(log_of(workspace, stage), **asked)).decode()


def test_the_newest_log_of_a_stage_is_found_with_its_key_and_without(workspace: Workspace) -> None:
    run(workspace, "1", prompts_b="old prompts", train_b="old training")
    run(workspace, "2", train_b="one\ntwo\nthree\n", dvc="of dvc")
    assert text_of(workspace, "train") == text_of(workspace, "train@b") == "one\ntwo\nthree\n"
    assert text_of(workspace, "train", lines=2) == "two\nthree\n" and text_of(workspace, "train", lines=0) == ""
    assert text_of(workspace, "prompts") == "old prompts"  # up to date in the newest run
    assert text_of(workspace, "dvc") == "of dvc"
    assert [log.stage for log in logs(workspace)] == ["prompts@b", "train@b", "dvc"]


def test_a_stage_that_left_none_is_named_with_the_one_that_was_meant(workspace: Workspace) -> None:
    with pytest.raises(PreflightError, match="nothing was run here yet"):
        log_of(workspace, "train")
    run(workspace, "1", train_b="", certify_b="", certify_c="")
    with pytest.raises(SettingsError, match="'trian@b' has left no log") as refusal:
        log_of(workspace, "trian@b")
    assert refusal.value.hint.startswith("did you mean 'train@b'?")
    with pytest.raises(SettingsError, match="'certify' may be any of certify@b, certify@c"):
        log_of(workspace, "certify")
    assert text_of(workspace, "certify@c") == ""


def test_a_log_is_followed_until_the_stage_has_ended(workspace: Workspace) -> None:
    folder = run(workspace, "1", pid=os.getpid(), state="running", train_b="first ")

    def go_on() -> None:
        time.sleep(0.3)
        with (folder / "train@b.log").open("a") as log:
            log.write("second")
        write_model(result_path(folder, "train", "b"), StageResult(stage="train", key="b", status="ran", seconds=1.0))

    writer = threading.Thread(target=go_on)
    writer.start()
    assert text_of(workspace, "train", follow=True) == "first second"
    writer.join()


def test_of_a_killed_run_nothing_more_is_awaited(workspace: Workspace) -> None:
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    run(workspace, "1", pid=gone, state="running", train_b="all there is")
    assert text_of(workspace, "train", follow=True) == "all there is"


def test_the_command(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run(workspace, "1", train_b="gr\u00fcn\nblau\n")
    monkeypatch.chdir(workspace.root)
    assert run_command(["logs", "train", "-n", "1"]) == 0
    assert capsysbinary.readouterr().out == b"blau\n"
    assert run_command(["logs", "train"]) == 0
    assert capsysbinary.readouterr().out.decode() == "gr\u00fcn\nblau\n"
    assert run_command(["logs", "train", "--path"]) == 0
    assert capsysbinary.readouterr().out == b".dspark/runs/1/train@b.log\n"
    assert run_command(["logs"]) == 0
    assert b"train@b" in capsysbinary.readouterr().out
    assert run_command(["logs", "--follow"]) == 2
    assert run_command(["logs", "nothing"]) == 2
