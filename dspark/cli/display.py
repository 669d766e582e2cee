"""How a run is shown while it goes: a bar on a terminal, sparse lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dspark.cli.options import duration, short
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from dspark.workspace.listener import Listener, Outcome

_QUIET_SECONDS = 15.0  # at most one line per stage in so many seconds where there is no terminal


def sentence(row: dict[str, Any]) -> str:
    """`train: 120/300 steps, 2.3/s, 1 min 18 s left, tau 1.42` from a line of the events file."""
    if row.get("event") == "note":
        return str(row.get("message", ""))
    text = f"{row.get('task', '')}: {row.get('done', 0)}/{row.get('total', 0)} {row.get('unit', '')}".strip()
    parts = [text]
    if "per_second" in row:
        parts.append(f"{row['per_second']:.3g}/s")
    if row.get("eta_seconds"):
        parts.append(f"{duration(row['eta_seconds'])} left")
    known = {"time", "stage", "task", "unit", "done", "total", "event", "per_second", "eta_seconds"}
    parts += [f"{key.replace('_', ' ')} {_short(value)}" for key, value in row.items() if key not in known]
    return ", ".join(parts)


class _Count:
    """Which of a run's stages is under way, and where the run keeps its logs."""

    def __init__(self) -> None:
        self._stages: Sequence[str] = ()
        self._ended: set[str] = set()
        self._place = ""

    def begin(self, stages: Sequence[str], folder: Path) -> None:
        """A run begins."""
        self._stages, self._ended, self._place = stages, set(), short(folder)

    def label(self, name: str) -> str:
        """`[3/10] features@tiny`; the name alone of what is none of the run's stages."""
        return f"[{len(self._ended - {name}) + 1}/{len(self._stages)}] {name}" if name in self._stages else name

    def end(self, name: str) -> None:
        """A stage ended."""
        if name in self._stages:
            self._ended.add(name)

    def place(self) -> str:
        """Where the logs are, for the first who asks."""
        place, self._place = self._place, ""
        return f"logs in {place}  (dspark logs STAGE; dspark status)" if place else ""


class Lines:
    """Sparse lines on stderr."""

    def __init__(self, out: IO[str], *, quiet: bool = False) -> None:
        self._out = out
        self._quiet = quiet
        self._last = 0.0
        self._count = _Count()

    def run_started(self, stages: Sequence[str], folder: Path) -> None:
        """Nothing yet: perhaps there is nothing to do."""
        self._count.begin(stages, folder)

    def stage_started(self, name: str) -> None:
        """One line."""
        self._last = time.monotonic()
        if place := self._count.place():
            self._print(place)
        self._print(f"{self._count.label(name)} ...")

    def stage_progress(self, row: dict[str, Any]) -> None:
        """A line now and then; notes always."""
        if row.get("event") == "note":
            self._print(f"  {sentence(row)}")
        elif row.get("event") != "start" and time.monotonic() - self._last >= _QUIET_SECONDS:
            self._last = time.monotonic()
            self._print(f"  {sentence(row)}")

    def stage_ended(self, outcome: Outcome) -> None:
        """One line for what did something."""
        self._count.end(outcome.name)
        if outcome.status != "up to date":
            self._print(ending(outcome))

    def note(self, message: str) -> None:
        """One line."""
        self._print(message, always=True)

    def _print(self, text: str, always: bool = False) -> None:
        if always or not self._quiet:
            print(text, file=self._out, flush=True)


class Bar:
    """One bar for the running stage, a line for each one that ended."""

    def __init__(self, out: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=out),
            transient=True,
        )
        self._task: Any = None
        self._count = _Count()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._progress.stop()

    def run_started(self, stages: Sequence[str], folder: Path) -> None:
        """Nothing yet: perhaps there is nothing to do."""
        self._count.begin(stages, folder)

    def stage_started(self, name: str) -> None:
        """A new bar."""
        self._clear()
        if place := self._count.place():
            self.note(place)
        self._task = self._progress.add_task(self._count.label(name), total=None, detail="")

    def stage_progress(self, row: dict[str, Any]) -> None:
        """Move the bar."""
        if row.get("event") == "note":
            self.note(f"  {sentence(row)}")
        elif self._task is not None:
            total = row.get("total") or None
            self._progress.update(self._task, completed=row.get("done", 0), total=total, detail=sentence(row))

    def stage_ended(self, outcome: Outcome) -> None:
        """A line instead of the bar."""
        self._count.end(outcome.name)
        self._clear()
        if outcome.status != "up to date":
            self.note(ending(outcome))

    def note(self, message: str) -> None:
        """A line above the bar."""
        self._progress.console.print(message, markup=False, highlight=False)

    def _clear(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


class Events:
    """JSON lines for other programs."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def run_started(self, stages: Sequence[str], folder: Path) -> None:
        """`run_started`, with the stages in their order."""
        row = {"event": "run_started", "stages": list(stages), "folder": str(folder), "time": round(time.time(), 3)}
        self._write(row)

    def stage_started(self, name: str) -> None:
        """`stage_started`."""
        self._write({"event": "stage_started", "stage": name, "time": round(time.time(), 3)})

    def stage_progress(self, row: dict[str, Any]) -> None:
        """The line as the stage wrote it."""
        self._write(row)

    def stage_ended(self, outcome: Outcome) -> None:
        """`stage_ended`, with how."""
        fields = {
            key: str(value) if isinstance(value, Path) else value for key, value in asdict(outcome).items() if value
        }
        stage = fields.pop("name")
        self._write({"event": "stage_ended", "stage": stage, "time": round(time.time(), 3), **fields})

    def note(self, message: str) -> None:
        """`note`."""
        self._write({"event": "note", "message": message, "time": round(time.time(), 3)})

    def _write(self, row: dict[str, Any]) -> None:
        print(json.dumps(row, ensure_ascii=False), file=self._out, flush=True)


class Several:
    """Tells several listeners.

    Whoever reads may go away, and a file may lie on a disk that is full: showing a run never stops it.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def run_started(self, stages: Sequence[str], folder: Path) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.run_started(stages, folder))

    def stage_started(self, name: str) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.stage_started(name))

    def stage_progress(self, row: dict[str, Any]) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.stage_progress(row))

    def stage_ended(self, outcome: Outcome) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.stage_ended(outcome))

    def note(self, message: str) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.note(message))

    def _tell(self, what: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                what(listener)


@contextmanager
def shown(*, quiet: bool = False, events: str | None = None) -> Iterator[Listener]:
    """The listener that suits the terminal; `events` names a file for JSON lines, `-` is stdout."""
    with ExitStack() as stack:
        listeners: list[Listener] = []
        if events == "-":
            listeners.append(Events(sys.stdout))
        elif events is not None:
            listeners.append(Events(stack.enter_context(_opened(Path(events)))))
        if sys.stderr.isatty() and not quiet:
            listeners.append(stack.enter_context(Bar(sys.stderr)))
        else:
            listeners.append(Lines(sys.stderr, quiet=quiet))
        yield Several(listeners)


def _opened(path: Path) -> IO[str]:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as reason:
        hint = "name a file in a folder that is there: --events FILE"
        raise SettingsError(f"--events {path}: cannot be written: {reason.strerror}", hint) from None


def ending(outcome: Outcome) -> str:
    """`train@tiny: ran in 12 s`."""
    took = f" in {duration(outcome.seconds)}" if outcome.seconds is not None and outcome.status == "ran" else ""
    return f"{outcome.name}: {outcome.status}{took}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
