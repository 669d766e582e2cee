"""`dspark logs`: what a stage printed, found by its name, and followed while it runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dspark.config.declared import suggestion
from dspark.errors import DataError, PreflightError, SettingsError
from dspark.workspace.layout import Workspace
from dspark.workspace.results import latest_run, read_record, read_result

DVC = "dvc"  # DVC's own output is no stage's
_INTERVAL_SECONDS = 0.2


@dataclass(frozen=True)
class Log:
    """What one stage printed in one run.

    Attributes:
        stage: `stage@key`, or `dvc`.
        run: the run's folder.
        path: the file.
    """

    stage: str
    run: Path
    path: Path

    @property
    def growing(self) -> bool:
        """True while the stage may print more: its run goes on and it has left no result."""
        try:
            record = read_record(self.run)
        except DataError:
            return False
        if record.state != "running" or not Path(f"/proc/{record.pid}").exists():
            return False
        stage, _, key = self.stage.partition("@")
        return self.stage == DVC or read_result(self.run, stage, key) is None


def logs(workspace: Workspace) -> list[Log]:
    """The newest log of every stage, in the order in which they were written.

    Raises:
        PreflightError: nothing was run here yet.
    """
    found: dict[str, Log] = {}
    for run in sorted(workspace.runs.glob("*"), reverse=True):
        for path in run.glob("*.log"):
            found.setdefault(path.stem, Log(path.stem, run, path))
    if not found or latest_run(workspace.runs) is None:
        raise PreflightError(f"{workspace.root}: nothing was run here yet", "dspark run --target NAME")
    return sorted(found.values(), key=lambda log: (log.run.name, log.path.stat().st_mtime_ns))


def log_of(workspace: Workspace, stage: str) -> Log:
    """The newest log of a stage.

    Args:
        stage: `stage@key`; without a key, the stage of the newest run, or of the newest one in which it ran; `dvc`.
    Raises:
        PreflightError: nothing was run here yet.
        SettingsError: no such log, or several are meant.
    """
    known = logs(workspace)
    meant = [log for log in known if stage in (log.stage, log.stage.partition("@")[0])]
    if not meant:
        raise SettingsError(f"stage {stage!r} has left no log", suggestion(stage, [log.stage for log in known]))
    newest = [log for log in meant if log.run == meant[-1].run]
    if len(newest) > 1:
        names = ", ".join(log.stage for log in newest)
        raise SettingsError(f"{stage!r} may be any of {names}", f"name one: dspark logs {newest[0].stage}")
    return newest[0]


def contents(log: Log, *, lines: int | None = None, follow: bool = False) -> Iterator[bytes]:
    """What a log holds, or the last lines of it, and on request what is added as long as the stage runs."""
    with log.path.open("rb") as handle:
        if lines is not None:
            yield from deque(handle, lines)
        while True:
            last = not (follow and log.growing)  # asked first: what is written before it ends is read
            while data := handle.read(1 << 16):
                yield data
            if last:
                return
            time.sleep(_INTERVAL_SECONDS)
