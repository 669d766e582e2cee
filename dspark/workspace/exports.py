"""Exports of targets as `dspark status` shows them, and what killed ones leave behind.

`.dspark/exports/<target>.json` says how the last export of a target stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.errors import DataError
from dspark.io.atomic import clear_unfinished
from dspark.io.jsonfile import read_model, write_model
from dspark.workspace.layout import Workspace


class ExportRecord(BaseModel):
    """What was exported where, by which process, and how that ended."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["dspark/export-record/1"] = Field(default="dspark/export-record/1", alias="schema")
    target: str
    out: str
    pid: int
    started: float  # seconds since the epoch
    finished: float | None = None
    state: Literal["running", "done", "failed", "interrupted", "killed"] = "running"
    message: str = ""

    @property
    def seconds(self) -> float:
        """How long it took, or runs already; of a killed one until that was noticed; 0 if the clock was set back."""
        return max(0.0, (self.finished or time.time()) - self.started)


def write_export(workspace: Workspace, record: ExportRecord) -> None:
    """Note how an export stands."""
    write_model(workspace.exports / f"{record.target}.json", record)


def read_exports(workspace: Workspace) -> list[ExportRecord]:
    """The last export of every target, the newest first; one whose process is gone is `killed`."""
    found = []
    for path in workspace.exports.glob("*.json"):
        try:
            record = read_model(path, ExportRecord)
        except DataError:
            continue  # of another version: it holds nothing that cannot be done again
        if record.state == "running" and not Path(f"/proc/{record.pid}").exists():
            record.state, record.message = "killed", f"nothing was written to {record.out}"
        found.append(record)
    return sorted(found, key=lambda record: -record.started)


def clear_killed(workspace: Workspace, out: Path, note: Callable[[str], None]) -> None:
    """Remove what killed exports left, and say so; call with the workspace held, when none can be under way.

    Args:
        out: of the export that begins.
        note: shows one line.
    """
    places = {out: f"an export to {out}"}
    for record in read_exports(workspace):
        if record.state == "killed" and record.finished is None:
            places[Path(record.out)] = f"the export of {record.target} to {record.out}"
            write_export(workspace, record.model_copy(update={"finished": time.time()}))
    for place, name in places.items():
        size = clear_unfinished(place)
        if size is not None:
            note(f"{name} was killed: removed its unfinished files ({size / 2**20:.1f} MiB)")
