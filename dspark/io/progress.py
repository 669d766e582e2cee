"""Progress of long work, and the safe points at which a requested stop is obeyed.

Library code reports through a `Progress`; who shows it is decided at the top. `advance` is the safe point: work done
before it is on disk or can be redone, so a requested stop raises `Interrupted` there and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

from typing_extensions import override

from dspark.errors import Interrupted

_stop = threading.Event()


def request_stop() -> None:
    """Ask the running work to stop at its next safe point."""
    _stop.set()


def stop_requested() -> bool:
    """True once a stop was asked for."""
    return _stop.is_set()


def install_stop_signals() -> None:
    """Turn the first SIGINT or SIGTERM into a requested stop and the second into an immediate one."""

    def on_signal(number: int, frame: object) -> None:
        if _stop.is_set():
            raise Interrupted(f"stopped by {signal.Signals(number).name}")
        _stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


class Progress:
    """Silent progress: the default of every library function, and the base of the ones that show something."""

    def start(self, task: str, total: int, done: int = 0, unit: str = "steps") -> None:
        """Begin a task of `total` units of which `done` were finished in an earlier attempt."""

    def advance(self, count: int = 1, **fields: Any) -> None:
        """Report `count` more units; a safe point.

        Raises:
            Interrupted: if a stop was requested.
        """
        if _stop.is_set():
            raise Interrupted("stopped at a safe point")

    def note(self, message: str) -> None:
        """One line worth reading that is not a failure."""


class EventProgress(Progress):
    """Progress as JSON lines appended to a file that the parent process reads.

    At most a few lines a second are written, and always the first and the last of a task.
    """

    def __init__(self, path: Path, stage: str, interval_seconds: float = 0.25) -> None:
        self._path = path
        self._stage = stage
        self._interval = interval_seconds
        self._task = ""
        self._unit = "steps"
        self._total = 0
        self._done = 0
        self._started = time.monotonic()
        self._at_start = 0
        self._written = 0.0

    @override
    def start(self, task: str, total: int, done: int = 0, unit: str = "steps") -> None:
        self._task, self._total, self._done, self._unit = task, total, done, unit
        self._started, self._at_start = time.monotonic(), done
        self._write(event="start")

    @override
    def advance(self, count: int = 1, **fields: Any) -> None:
        self._done += count
        if self._done >= self._total or time.monotonic() - self._written >= self._interval:
            self._write(event="progress", **fields)
        super().advance(count)

    @override
    def note(self, message: str) -> None:
        self._write(event="note", message=message)

    def _write(self, **fields: Any) -> None:
        self._written = time.monotonic()
        elapsed = self._written - self._started
        row = {
            "time": round(time.time(), 3),
            "stage": self._stage,
            "task": self._task,
            "unit": self._unit,
            "done": self._done,
            "total": self._total,
            **fields,
        }
        if elapsed > 0 and self._done > self._at_start:
            rate = (self._done - self._at_start) / elapsed
            row |= {"per_second": round(rate, 4), "eta_seconds": round(max(self._total - self._done, 0) / rate, 1)}
        # On a full disk: what the work itself cannot write will say so, and a line is not worth stopping for.
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
