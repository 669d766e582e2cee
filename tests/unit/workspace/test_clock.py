"""A clock that was set back: runs keep their order, nothing lasts a negative time, and `doctor` says it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dspark.workspace import doctor, results
from dspark.workspace.exports import ExportRecord
from dspark.workspace.layout import Workspace
from dspark.workspace.results import RunRecord, latest_run, new_run, write_record
from dspark.workspace.status import status


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch):
    """Sets the wall clock so many hours from now."""

    def set_to(hours: float) -> None:
        moment = datetime.now(UTC) + timedelta(hours=hours)

        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return moment.astimezone(tz)

        monkeypatch.setattr(results, "datetime", Clock)
        monkeypatch.setattr(time, "time", moment.timestamp)

    return set_to


def begin(workspace: Workspace, pid: int) -> Path:
    folder = new_run(workspace.runs, pid)
    write_record(folder, RunRecord(id=folder.name, build="b", pid=pid, started=time.time(), state="done"))
    return folder


def test_runs_keep_their_order_whatever_the_clock_says(tmp_path: Path, set_clock) -> None:
    workspace = Workspace(tmp_path)
    made = []
    for number, hours in enumerate((0, -5, -5, 3, -1000, 0)):
        set_clock(hours)
        made.append(begin(workspace, 9_999_990 - number))
        assert latest_run(workspace.runs) == made[-1]
        assert status(workspace).folder == made[-1]
    assert sorted(made) == made and len({folder.name for folder in made}) == len(made)
    # A clock that runs well is what ids say.
    (tmp_path / "other").mkdir()
    stamp = new_run(tmp_path / "other" / "runs", 1).name.partition("-")[0]
    assert stamp == results.datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def test_folders_that_are_no_runs_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "runs" / "my notes").mkdir(parents=True)
    (tmp_path / "runs" / "99990101-1").mkdir()
    assert new_run(tmp_path / "runs", 1).name.startswith(f"{datetime.now(UTC):%Y}")


def test_nothing_lasts_a_negative_time() -> None:
    record = RunRecord(id="r", build="b", pid=1, started=100.0)
    assert record.model_copy(update={"finished": 90.0}).seconds == 0
    assert record.model_copy(update={"finished": 103.5}).seconds == 3.5
    assert ExportRecord(target="t", out="o", pid=1, started=time.time() + 50).seconds == 0


def test_doctor_says_that_the_clock_stands_before_the_last_run(tmp_path: Path, set_clock) -> None:
    workspace = Workspace(tmp_path)
    assert doctor._clock(workspace).status == "ok"
    begin(workspace, 1)
    assert doctor._clock(workspace).status == "ok"
    set_clock(-2)
    found = doctor._clock(workspace)
    assert (found.status, found.fix) == ("warning", "set the clock right")
    assert "still to come" in found.found
