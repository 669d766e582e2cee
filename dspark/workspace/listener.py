"""Who is told what happens in a run: the protocol, and library progress shown as if it were a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from dspark.io.progress import Progress

Status = Literal["ran", "restored", "up to date", "failed", "interrupted", "not reached"]


@dataclass
class Outcome:
    """How one stage of a run ended, or stands."""

    name: str  # stage@key
    status: Status = "not reached"
    seconds: float | None = None
    message: str = ""
    hint: str = ""
    exit_code: int = 0
    log: Path | None = None


class Listener(Protocol):
    """Shows a run as it goes."""

    def run_started(self, stages: Sequence[str], folder: Path) -> None:
        """A run begins to look at these stages, in this order; `folder` gets its logs."""

    def stage_started(self, name: str) -> None:
        """A stage began."""

    def stage_progress(self, row: dict[str, Any]) -> None:
        """A line of the events file (`io.progress.EventProgress`)."""

    def stage_ended(self, outcome: Outcome) -> None:
        """A stage ended, or needed no run."""

    def note(self, message: str) -> None:
        """One line worth reading."""


class Silent:
    """A listener that shows nothing."""

    def run_started(self, stages: Sequence[str], folder: Path) -> None:
        """Show nothing."""

    def stage_started(self, name: str) -> None:
        """Show nothing."""

    def stage_progress(self, row: dict[str, Any]) -> None:
        """Show nothing."""

    def stage_ended(self, outcome: Outcome) -> None:
        """Show nothing."""

    def note(self, message: str) -> None:
        """Show nothing."""


class ListenedProgress(Progress):
    """Progress of work in this process, shown as one more stage; begins to show when the work has a size.

    Args:
        listener: shows it.
        name: what the stage is called.
    """

    def __init__(self, listener: Listener, name: str) -> None:
        self._listener = listener
        self._name = name
        self._row: dict[str, Any] = {}

    def start(self, task: str, total: int, done: int = 0, unit: str = "steps") -> None:
        """Begin to show a task."""
        if not self._row:
            self._listener.stage_started(self._name)
        self._row = {"stage": self._name, "task": task, "done": done, "total": total, "unit": unit}

    def advance(self, count: int = 1, **fields: Any) -> None:
        """Show it further on; a safe point."""
        self._row["done"] = self._row.get("done", 0) + count
        self._listener.stage_progress({**self._row, **fields})
        super().advance(count)

    def note(self, message: str) -> None:
        """Show a line."""
        self._listener.note(message)

    def end(self, seconds: float) -> None:
        """The work is done; says nothing if there was none."""
        if self._row:
            self._listener.stage_ended(Outcome(self._name, "ran", seconds))
