"""What a run leaves behind for whoever watches it: one folder per run, one result per stage.

`.dspark/runs/<id>/`: `run.json` (what was asked for, by which process, how it ended), `<stage>@<key>.json` (stage
results), `<stage>@<key>.log`, `dvc.log`, `events.jsonl`.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.errors import DataError
from dspark.io.jsonfile import read_model, write_model

StageStatus = Literal["ran", "failed", "interrupted"]
RunState = Literal["running", "done", "failed", "interrupted"]
_MOMENT = "%Y%m%dT%H%M%S.%fZ"  # what a run's id begins with


class _Json(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True)


class StageResult(_Json):
    """How one stage ended. DVC hides the exit code and the reason of a failed command, this file keeps them."""

    schema_: Literal["dspark/stage-result/1"] = Field(default="dspark/stage-result/1", alias="schema")
    stage: str
    key: str
    status: StageStatus
    seconds: float
    category: str = ""  # class of the error
    exit_code: int = 0
    message: str = ""
    hint: str = ""
    outputs: list[str] = []


class RunRecord(_Json):
    """What a run was asked to do and how it stands."""

    schema_: Literal["dspark/run-record/1"] = Field(default="dspark/run-record/1", alias="schema")
    id: str
    build: str
    pid: int
    started: float  # seconds since the epoch
    finished: float | None = None
    state: RunState = "running"
    exit_code: int | None = None
    message: str = ""
    stages: list[str] = []  # planned, `stage@key`
    flags: list[str] = []  # of `--set`
    options: list[str] = []  # that decide where the package goes: `--tracking-uri`, `--no-publish`
    verb: list[str] = ["run"]  # what asked for it: words after `dspark`, without the three above

    @property
    def seconds(self) -> float:
        """How long it took, or runs already; 0 if the clock was set back meanwhile."""
        return max(0.0, (self.finished or time.time()) - self.started)

    @property
    def command(self) -> str:
        """What goes on with this run."""
        return command_line(self.verb, self.build, self.flags, self.options)


def command_line(verb: Sequence[str], build: str, flags: Sequence[str] = (), options: Sequence[str] = ()) -> str:
    """A command about a build, as a shell takes it; with the flags that the build was resolved with it is that build.

    Args:
        verb: the words after `dspark`.
        flags: of `--set`.
        options: what else stands at its end.
    """
    overrides = (word for flag in flags for word in ("--set", flag))
    return shlex.join(["dspark", *verb, "--build", build, *overrides, *options])


def result_path(run: Path, stage: str, key: str) -> Path:
    """Where the result of one stage lies."""
    return run / f"{stage}@{key}.json"


def log_path(run: Path, stage: str, key: str) -> Path:
    """Where what one stage printed lies."""
    return run / f"{stage}@{key}.log"


def read_result(run: Path, stage: str, key: str) -> StageResult | None:
    """The result of one stage in a run, None if it left none (it did not run, or was killed)."""
    path = result_path(run, stage, key)
    return read_model(path, StageResult) if path.is_file() else None


def write_record(run: Path, record: RunRecord) -> None:
    """Write `run.json`."""
    write_model(run / "run.json", record)


def new_run(runs: Path, pid: int) -> Path:
    """Make the folder of a run that begins. Its id sorts after those that are there, even if the clock was set back.

    Call only while holding the run lock.
    """
    moment = datetime.now(UTC)
    if runs.is_dir():
        for path in runs.iterdir():
            with contextlib.suppress(ValueError):  # no run of ours
                known = datetime.strptime(path.name.partition("-")[0], _MOMENT).replace(tzinfo=UTC)
                moment = max(moment, known + timedelta(microseconds=1))
    folder = runs / f"{moment:{_MOMENT}}-{pid}"
    folder.mkdir(parents=True)
    return folder


def latest_run(runs: Path) -> Path | None:
    """The folder of the newest run; ids sort in the order of their runs."""
    found = sorted(path.parent for path in runs.glob("*/run.json")) if runs.is_dir() else []
    return found[-1] if found else None


def flags_of(runs: Path, build: str) -> tuple[str, ...]:
    """What the newest run that made a build was given by `--set`: with it, it is the build whose results lie there.

    A study is about a build, and may make its variants alone.
    """
    for path in sorted(runs.glob("*/run.json"), reverse=True):
        with contextlib.suppress(DataError):  # a damaged record tells of no build
            record = read_record(path.parent)
            if f"evaluate@{build}" in record.stages:
                return tuple(record.flags)
    return ()


def read_record(run: Path) -> RunRecord:
    """Read `run.json`.

    Raises:
        DataError: missing or damaged.
    """
    return read_model(run / "run.json", RunRecord, DataError, "start a run: dspark run --target NAME")
