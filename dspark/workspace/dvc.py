"""DVC as a child process: its commands, and what its output says about each stage.

The command line is DVC's stable interface; its Python API is not. Its output goes to a file that is read from the
side, so that a killed `dspark run` leaves no broken pipe behind.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dspark.errors import PreflightError, StageError
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Listener, Outcome, Status
from dspark.workspace.process import child_environment
from dspark.workspace.results import StageResult, log_path, read_result

NEVER_RAN = "it has not run yet"
_RUNNING = re.compile(r"^Running stage '(?P<stage>[^']+)':")
_UNCHANGED = re.compile(r"^Stage '(?P<stage>[^']+)' didn't change, skipping")
_EXITED = re.compile(r"failed to run: .*exited with (?P<code>-?\d+)$")
_INVALID = re.compile(r"^(?P<what>\S.*, in .*), line (?P<line>\d+), column \d+$", re.MULTILINE)
RESTORE = "mend it, or restore it: git checkout dvc.yaml"
_CACHED = re.compile(r"^Stage '(?P<stage>[^']+)' is cached - skipping run")


class Tail:
    """Reads the complete lines that were appended to a file since the last look.

    Args:
        path: the file; it may not exist yet.
        whole: begin with what is in it already.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if path.is_file() and not whole else 0

    def lines(self) -> list[str]:
        """New complete lines, without their ends."""
        try:
            with self._path.open("rb") as handle:
                handle.seek(self._position)
                data = handle.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()

    def rows(self) -> list[dict[str, Any]]:
        """The same as JSON objects; a line that a full disk cut off is left out."""
        found = []
        for line in self.lines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [row for row in found if isinstance(row, dict)]


class Watcher:
    """Follows DVC's output and the stages' events, and knows how every stage stands.

    Args:
        run: the folder of the run.
        planned: stages that are expected, `stage@key`.
        listener: told what happens.
        whole: begin with what the run's files hold already.
    """

    def __init__(self, run: Path, planned: Sequence[str], listener: Listener, *, whole: bool = False) -> None:
        self.outcomes = {name: Outcome(name) for name in planned}
        self._run = run
        self._listener = listener
        self._log = Tail(run / "dvc.log", whole=whole)
        self._events = Tail(run / "events.jsonl", whole=whole)
        self._rows: list[dict[str, Any]] = []  # events of stages whose start or end the log has yet to show
        self._running: str | None = None
        self._since = 0.0
        self._exited: int | None = None

    def tick(self) -> None:
        """Look at what is new."""
        # The log first: the events of a stage that it shows as ended are then all there, and are told before its end.
        lines = self._log.lines()
        self._rows += self._events.rows()
        self._tell()
        for line in lines:
            self._read(line)
            self._tell()
        ended = {name for name, outcome in self.outcomes.items() if outcome.status != "not reached"}
        self._rows = [row for row in self._rows if row.get("stage") not in ended]

    def _tell(self) -> None:
        for row in self._rows:
            if row.get("stage") == self._running:
                self._listener.stage_progress(row)
        self._rows = [row for row in self._rows if row.get("stage") != self._running]

    @property
    def running(self) -> str | None:
        """The stage that runs now."""
        return self._running

    def follow(self, name: str) -> None:
        """A step was started outside DVC."""
        self._running, self._since = name, time.monotonic()
        self._listener.stage_started(name)

    def finish(self, without_result: Status) -> list[Outcome]:
        """The command has ended: settle what was running, and say how every stage ended.

        Args:
            without_result: what a stage came to that left no result.
        """
        self.tick()
        self._settle(without_result)
        return list(self.outcomes.values())

    def _read(self, line: str) -> None:
        if match := _RUNNING.match(line):
            self._settle("ran")
            self.follow(match["stage"])
        elif match := _UNCHANGED.match(line):
            self._settle("ran")
            self._end(Outcome(match["stage"], "up to date"))
        elif match := _CACHED.match(line):
            self._settle("ran")
            self._end(Outcome(match["stage"], "restored"))
        elif match := _EXITED.search(line):
            self._exited = int(match["code"])

    def _settle(self, without_result: Status) -> None:
        """End the running stage by its own result; `without_result` is what it came to if it left none."""
        if self._running is None:
            return
        name, seconds = self._running, time.monotonic() - self._since
        self._running = None
        stage, _, key = name.partition("@")
        log = log_path(self._run, stage, key)
        result = read_result(self._run, stage, key)
        if result is not None:
            self._end(_outcome(result, log))
            return
        outcome = Outcome(name, without_result, seconds, log=log if log.is_file() else self._run / "dvc.log")
        if without_result == "failed":
            outcome.message, outcome.hint = _unexplained(self._exited)
            outcome.exit_code = StageError.exit_code
        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        self._listener.stage_ended(outcome)


def _unexplained(code: int | None) -> tuple[str, str]:
    """Message and hint of a stage that left no result."""
    if code is not None and code not in (-9, 137):
        return f"it ended with exit code {code} and no result", "its log shows what it printed"
    hint = "out of memory? lower the batch sizes; the same command goes on from the last safe point"
    return "it ended without a result: it was killed", hint


def repro_command(targets: Iterable[str]) -> list[str]:
    """The command that makes stages and all they depend on."""
    # Without --wait-for-lock a stage of many hours could end in a lock error because of one `dvc status` elsewhere.
    return [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *targets]


def prepare_cache(workspace: Workspace) -> None:
    """Make DVC's databases private: DVC itself would make a folder that everyone may write pickles into."""
    (workspace.dvc_cache / "repo").mkdir(mode=0o700, parents=True, exist_ok=True)
    workspace.dvc_cache.chmod(0o700)


def invalid_pipeline(said: str) -> PreflightError | None:
    """What DVC found wrong with the keys of dvc.yaml, from what it printed; None if that is about something else."""
    if "dvc.yaml' is invalid" not in said and "dvc.yaml' validation failed" not in said:
        return None
    found = _INVALID.search(said)
    where = f"dvc.yaml:{found['line']}: {found['what']}" if found else "dvc.yaml is invalid"
    return PreflightError(where, RESTORE)


def changed_stages(workspace: Workspace, *targets: str) -> dict[str, list[str]]:
    """What `dvc status` says about stages and everything they depend on.

    Returns:
        for each stage that would run, the reasons; of one that never ran, that.
    Raises:
        PreflightError: DVC cannot read the workspace.
    """
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "status", "--json", "--with-deps", *targets]
    prepare_cache(workspace)
    done = subprocess.run(
        command,
        cwd=workspace.root,
        env=child_environment(workspace, None),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise invalid_pipeline(done.stderr) or PreflightError(
            f"dvc status: {lines[0] if lines else 'failed'}", "dspark doctor"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    # DVC calls everything that a stage reads `modified`, also of one that never ran.
    ran = stages_that_ran(workspace)
    return {name: _reasons(changes) if name in ran else [NEVER_RAN] for name, changes in found.items()}


def stages_that_ran(workspace: Workspace) -> set[str]:
    """Stages that `dvc.lock` knows."""
    from dspark.io.yamlfile import read_yaml  # `dspark status` needs no parser

    path = workspace.root / "dvc.lock"
    lock = read_yaml(path) if path.is_file() else None
    return set(lock.get("stages") or ()) if isinstance(lock, dict) else set()


def _reasons(changes: Iterable[Any]) -> list[str]:
    """DVC's list of changes as short sentences."""
    reasons = []
    for change in changes:
        if not isinstance(change, dict):
            reasons.append(str(change))
            continue
        for kind, paths in change.items():
            for path, what in paths.items():
                if kind == "changed outs":
                    reasons.append(f"output {'is not made yet' if what == 'deleted' else what}: {path}")
                else:
                    reasons.append(_reason(path, what))
    return reasons


def _reason(path: str, what: str) -> str:
    if path.startswith(".dspark/inputs/"):
        return "its settings or code changed"
    if path.startswith(".dspark/fingerprints/"):
        return "the machine or a library version changed"
    if path.startswith("targets/"):
        return "the target changed" if what != "deleted" else "the target is not fetched yet"
    return f"{path} {'is not made yet' if what == 'deleted' else 'changed'}"


def _outcome(result: StageResult, log: Path) -> Outcome:
    return Outcome(
        name=f"{result.stage}@{result.key}",
        status=result.status,
        seconds=result.seconds,
        message=result.message,
        hint=result.hint,
        exit_code=result.exit_code,
        log=log,
    )
