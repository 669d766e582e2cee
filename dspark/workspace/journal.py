"""A run writes down for the tracking server what it changed; nothing here opens a connection.

The journal begins with the first change, so that a run which finds everything made leaves none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.config.stages import BY_NAME
from dspark.errors import DataError, PreflightError
from dspark.io.jsonfile import read_json
from dspark.registry.events import Ended, Event, PackageMade, RunStatus, Started
from dspark.registry.publish import stage_ended
from dspark.registry.spool import Journal, Spool, append
from dspark.workspace.inputs import read_entry
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Listener, Outcome
from dspark.workspace.lock import holder
from dspark.workspace.results import RunRecord, read_result

_UNCHANGED = ("up to date", "not reached")


class RunJournal:
    """A listener that passes everything on and keeps what the tracking server has to know.

    Args:
        workspace: the workspace; its run lock is held.
        spool: gets the journal.
        run: folder of the run.
        record: what was asked for.
        listener: told everything as well.
    """

    def __init__(self, workspace: Workspace, spool: Spool, run: Path, record: RunRecord, listener: Listener) -> None:
        self._workspace = workspace
        self._spool = spool
        self._run = run
        self._record = record
        self._listener = listener
        self._folder: Path | None = None
        self._waiting: list[Event] = []
        self._over = False

    @property
    def begun(self) -> bool:
        """True once something was changed."""
        return self._folder is not None

    def run_started(self, stages: Sequence[str], folder: Path) -> None:
        """Pass it on."""
        self._listener.run_started(stages, folder)

    def stage_started(self, name: str) -> None:
        """A stage began: from now on the run is one that changed something."""
        self._begin()
        self._listener.stage_started(name)

    def stage_progress(self, row: dict[str, Any]) -> None:
        """Pass it on."""
        self._listener.stage_progress(row)

    def stage_ended(self, outcome: Outcome) -> None:
        """Write down how a stage ended."""
        stage, _, key = outcome.name.partition("@")
        result = read_result(self._run, stage, key)
        row = {"stage": stage, "key": key, "status": outcome.status, "seconds": outcome.seconds}
        row |= {"category": result.category if result else "", "message": outcome.message}
        event = stage_ended(row, self._metrics(stage, key) if outcome.status == "ran" else None)
        if outcome.status in _UNCHANGED and self._folder is None:
            self._waiting.append(event)
        else:
            append(self._begin(), event)
        self._listener.stage_ended(outcome)

    def note(self, message: str) -> None:
        """Pass it on."""
        self._listener.note(message)

    def end(self, status: RunStatus, exit_code: int, message: str = "") -> bool:
        """The run is over, except for publishing; the first word on that counts.

        Returns:
            True if this was the first.
        """
        if self._over:
            return False
        if self._folder is not None:
            append(self._folder, Ended(time=time.time(), status=status, exit_code=exit_code, message=message))
        self._over = True  # not before it is on disk: where there was no room, the next word counts
        return True

    def package(self, event: PackageMade) -> None:
        """A package is to be registered; its run is over, and may have changed nothing else."""
        folder = self._folder
        if folder is None:
            folder = self._begin()
            append(folder, Ended(time=time.time(), status="FINISHED", exit_code=0))
        append(folder, event)

    def _begin(self) -> Path:
        if self._folder is None:
            record = self._record
            self._folder = self._spool.begin(record.id, record.build, record.command, self._waiting)
        return self._folder

    def _metrics(self, stage: str, key: str) -> dict[str, float]:
        """The plain numbers of a stage's own summary, for runs that come to no package."""
        spec = BY_NAME.get(stage)
        if spec is None or spec.writes_file:  # a step outside the DAG, or a stage whose output is one record
            return {}
        try:
            output = spec.output(key, read_entry(self._workspace, stage, key))
            value = read_json(self._workspace.root / output / "metrics.json")
        except (DataError, PreflightError):
            return {}
        numbers = value.items() if isinstance(value, dict) else ()
        return {
            name: float(number)
            for name, number in numbers
            if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
        }


def orphans(workspace: Workspace, spool: Spool) -> list[Journal]:
    """Journals of runs of this workspace that were killed and whose end nobody has written yet."""
    return spool.orphans(lambda started: _under_way(workspace, started))


def close_orphans(workspace: Workspace, spool: Spool) -> list[Journal]:
    """Write into these journals that the runs were killed."""
    return spool.close_orphans(lambda started: _under_way(workspace, started))


def _under_way(workspace: Workspace, started: Started) -> bool:
    """One run at a time holds the workspace; what a killed one left running may hold it in its name for a while."""
    owner = holder(workspace)
    return owner is not None and owner["pid"] == started.pid and Path(f"/proc/{started.pid}").exists()
