"""`dspark status`: how the newest run stands, read from its files by any other process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dspark.errors import PreflightError
from dspark.io.jsonfile import model_json
from dspark.workspace.dvc import Tail, Watcher
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Outcome, Silent
from dspark.workspace.results import RunRecord, latest_run, read_record

State = Literal["running", "done", "failed", "interrupted", "killed"]


@dataclass(frozen=True)
class Standing:
    """How a run stands."""

    folder: Path
    record: RunRecord
    state: State
    seconds: float
    stages: tuple[Outcome, ...]
    running: str | None  # the stage under way
    progress: dict[str, Any] | None  # its last reported progress

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        stages = [
            {key: str(value) if isinstance(value, Path) else value for key, value in asdict(outcome).items() if value}
            for outcome in self.stages
        ]
        return {
            "schema": "dspark/status/1",
            "run": {**model_json(self.record), "state": self.state},
            "seconds": round(self.seconds, 1),
            "stages": stages,
            **({"running": self.running} if self.running else {}),
            **({"progress": self.progress} if self.progress else {}),
        }


def status(workspace: Workspace) -> Standing:
    """The newest run of the workspace.

    Raises:
        PreflightError: nothing was run here yet.
    """
    folder = latest_run(workspace.runs)
    if folder is None:
        raise PreflightError(f"{workspace.root}: nothing was run here yet", "dspark run --target NAME")
    record = read_record(folder)
    watcher = Watcher(folder, record.stages, Silent(), whole=True)
    watcher.tick()
    state: State = record.state
    if state == "running" and not Path(f"/proc/{record.pid}").exists():
        state = "killed"
    running = watcher.running if state == "running" else None
    outcomes = watcher.outcomes
    if running is None and watcher.running is not None:
        left: Literal["interrupted", "failed"] = "failed" if state == "failed" else "interrupted"
        watcher.finish(left)
    return Standing(
        folder=folder,
        record=record,
        state=state,
        seconds=record.seconds,
        stages=tuple(outcomes.values()),
        running=running,
        progress=_last_progress(folder, running) if running else None,
    )


def _last_progress(folder: Path, stage: str) -> dict[str, Any] | None:
    mine = [row for row in Tail(folder / "events.jsonl", whole=True).rows() if row.get("stage") == stage]
    return mine[-1] if mine else None
