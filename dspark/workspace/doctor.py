"""`dspark doctor`: what is wrong with this machine, this environment or this workspace, and what mends it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dspark import __version__
from dspark.config.resolve import resolve_all
from dspark.errors import DataError, IntegrityError, PreflightError
from dspark.io.jsonfile import write_model
from dspark.registry.location import left_behind
from dspark.registry.publish import spool_of
from dspark.workspace import preflight
from dspark.workspace.environment import Check, environment
from dspark.workspace.journal import close_orphans, orphans
from dspark.workspace.layout import Workspace
from dspark.workspace.lock import complete_lock_file, damaged_rwlock, dvc_processes, holder, repair_dvc, run_lock
from dspark.workspace.results import RunRecord, latest_run, read_record
from dspark.workspace.scaffold import written_by
from dspark.workspace.services import services

_SYNC = "dspark registry sync"
LOW_BYTES = 5 * 1024**3
_CLOCK_SECONDS = 60  # so far apart the clocks of two machines on one disk may be


@dataclass(frozen=True)
class Diagnosis:
    """All checks."""

    checks: tuple[Check, ...]
    repaired: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """True if nothing is an error."""
        return all(check.status != "error" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {"schema": "dspark/doctor/1", "healthy": self.healthy, **asdict(self)}


def examine(workspace: Workspace | None, *, fix: bool = False) -> Diagnosis:
    """Look at everything.

    Args:
        workspace: None: only the environment.
        fix: first mend what can be mended without losing anything.
    """
    repaired = _repair(workspace) if workspace is not None and fix else []
    checks = [*environment(), *(_workspace(workspace) if workspace is not None else [_no_workspace()])]
    return Diagnosis(tuple(checks), tuple(repaired))


def _no_workspace() -> Check:
    return Check("workspace", "warning", "the current folder is not in a workspace", "make one: dspark init DIR")


def _workspace(workspace: Workspace) -> Iterator[Check]:
    yield Check("workspace", "ok", str(workspace.root))
    yield _files(workspace)
    yield _disk(workspace)
    yield _dvc_settings(workspace)
    for problem in preflight.unreadable_pipeline(workspace):
        yield Check("pipeline", "error", problem.what, problem.hint)
    yield _lock(workspace)
    yield _rwlock(workspace)
    yield _dvc_lock(workspace)
    yield _last_run(workspace)
    yield _clock(workspace)
    yield _unfinished(workspace)
    yield from _tracking(workspace)
    yield from _moved(workspace)
    builds, broken = resolve_all(workspace.root)
    yield from services(workspace, builds.values())
    for name, error in broken.items():
        yield Check(f"build {name}", "error", error.message, error.hint)


def _files(workspace: Workspace) -> Check:
    """The version that wrote the workspace's files; those of a checkout are of the checkout itself."""
    try:
        version = written_by(workspace)
    except PreflightError as error:
        return Check("workspace files", "warning", error.message, error.hint)
    if version is not None and version != __version__:
        return Check(
            "workspace files",
            "warning",
            f"written by dspark {version}, this is {__version__}",
            "see what would change: dspark init --upgrade",
        )
    return Check("workspace files", "ok", f"of dspark {version or __version__}")


def _disk(workspace: Workspace) -> Check:
    free = shutil.disk_usage(workspace.root).free
    if problems := preflight.full_disk(workspace):
        return Check("disk", "error", problems[0].what, problems[0].hint)
    if free < LOW_BYTES:
        fix = "what nothing names any more: dspark store gc --dry-run; what a build takes: dspark plan --estimate"
        return Check("disk", "warning", f"{free / 1024**3:.1f} GiB free: larger builds will not fit", fix)
    return Check("disk", "ok", f"{free / 1024**3:.0f} GiB free")


def _dvc_settings(workspace: Workspace) -> Check:
    path = workspace.root / ".dvc" / "config"
    if not path.is_file():
        return Check("dvc settings", "error", f"{path} is missing", "dspark init --upgrade --yes")
    text = path.read_text(encoding="utf-8").replace(" ", "")
    missing = [line for line in ("no_scm=true", "analytics=false") if line not in text]
    if missing:
        return Check("dvc settings", "warning", f"{path} does not say {', '.join(missing)}", "dspark init --upgrade")
    return Check("dvc settings", "ok", "telemetry off, independent of git")


def _lock(workspace: Workspace) -> Check:
    owner = holder(workspace)
    if owner is None:
        return Check("run lock", "ok", "free")
    pid = int(str(owner["pid"]))
    if Path(f"/proc/{pid}").exists():
        return Check("run lock", "ok", f"held by {owner['purpose']} (process {pid})")
    left = dvc_processes(workspace)
    found = f"held by what a killed run (process {pid}) left running: {left or 'processes that cannot be seen'}"
    return Check("run lock", "error", found, f"kill {' '.join(map(str, left)) or '<processes>'}")


def _rwlock(workspace: Workspace) -> Check:
    table = damaged_rwlock(workspace)
    if table is None:
        return Check("dvc file locks", "ok", "readable")
    return Check(
        "dvc file locks",
        "error",
        f"{table} is empty or cut off: every dvc command fails",
        f"dspark doctor --fix (or: rm {table})",
    )


def _dvc_lock(workspace: Workspace) -> Check:
    path = workspace.root / "dvc.lock"
    if path.is_file() and not complete_lock_file(path.read_bytes()):
        return Check("dvc.lock", "error", f"{path} is cut off", "dspark doctor --fix")
    return Check("dvc.lock", "ok", "readable" if path.is_file() else "nothing was made yet")


def _last_run(workspace: Workspace) -> Check:
    try:
        found = _dead_run(workspace)
    except DataError as error:
        return Check("last run", "warning", error.message, "nothing but its history is lost; the next run starts anew")
    if found is None:
        return Check("last run", "ok", "none is left over")
    folder, record = found
    return Check(
        "last run",
        "warning",
        f"{folder.name} was killed (process {record.pid})",
        f"go on from where it stopped: {record.command}",
    )


def _unfinished(workspace: Workspace) -> Check:
    folders = [path for path in workspace.state.glob("work/*/*") if path.is_dir()]
    if not folders:
        return Check("unfinished work", "ok", "none")
    size = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    return Check(
        "unfinished work",
        "ok",
        f"{len(folders)} stages can be resumed, {size / 1024**2:.1f} MiB in {workspace.state / 'work'}",
    )


def _tracking(workspace: Workspace) -> Iterator[Check]:
    """What waits for the tracking server; nobody is asked."""
    spool = spool_of(workspace.root)
    journals, broken = spool.journals()
    for error in broken:
        yield Check("tracking", "error", error.message, error.hint)
    killed = orphans(workspace, spool)
    if killed:
        names = ", ".join(journal.started.run for journal in killed)
        yield Check("killed runs", "warning", f"still running for the tracking server: {names}", _SYNC)
    waiting = [journal for journal in journals if journal.ended is not None]
    if waiting:
        events, packages = (sum(len(one.events) for one in waiting), sum(len(one.packages) for one in waiting))
        found = f"{events} events of {len(waiting)} runs and {packages} packages wait for the tracking server"
        yield Check("tracking", "warning", found, _SYNC)
    if not broken and not killed and not waiting:
        yield Check("tracking", "ok", "nothing waits for the tracking server")


def _moved(workspace: Workspace) -> Iterator[Check]:
    """Is the workspace still where its registry was made?"""
    try:
        places = left_behind(workspace.root)
    except IntegrityError as error:
        yield Check("registry", "error", error.message, error.hint)
        return
    here = workspace.root / "mlflow" / "artifacts"
    for place in places:
        yield Check(
            "registry",
            "warning",
            f"this workspace was moved: its registry remembers files in {place}, which is gone. dspark finds them in "
            f"{here}, MLflow's own pages do not",
            f"for those: mkdir -p {shlex.quote(str(place.parent))} && ln -s {shlex.quote(str(here))} "
            f"{shlex.quote(str(place))}",
        )


def _clock(workspace: Workspace) -> Check:
    """A clock that was set back does no harm to runs, but nobody can tell whether a certificate has expired."""
    folder = latest_run(workspace.runs)
    started = 0.0
    if folder is not None:
        with contextlib.suppress(DataError):  # reported by `last run`
            started = read_record(folder).started
    if started > time.time() + _CLOCK_SECONDS:
        moment = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
        return Check(
            "clock", "warning", f"the last run began at {moment}, which is still to come here", "set the clock right"
        )
    return Check("clock", "ok", "after the last run")


def _dead_run(workspace: Workspace) -> tuple[Path, RunRecord] | None:
    """The newest run if it still says `running` although its process is gone.

    Raises:
        DataError: its record is damaged.
    """
    folder = latest_run(workspace.runs)
    if folder is None:
        return None
    record = read_record(folder)
    dead = record.state == "running" and not Path(f"/proc/{record.pid}").exists()
    return (folder, record) if dead else None


def _repair(workspace: Workspace) -> list[str]:
    done: list[str] = []
    with run_lock(workspace, "dspark doctor --fix", done.append, patience_seconds=5):
        done += repair_dvc(workspace)
        found = None
        with contextlib.suppress(DataError):  # reported by the check
            found = _dead_run(workspace)
        if found is not None:
            folder, record = found
            record.state, record.message = "failed", "the process was killed"
            write_model(folder / "run.json", record)
            done.append(f"marked the killed run {folder.name} as failed")
        for journal in close_orphans(workspace, spool_of(workspace.root)):
            done.append(f"noted for the tracking server that run {journal.started.run} was killed")
    return done
