"""The spool: what runs have to tell the tracking server, on disk, in order, until it was told.

`.dspark/spool/<order>-<run>/<number>.json`: one folder per run that changed something (its journal), one file per
event, each complete or absent. Nothing here opens a connection or loads mlflow. What was delivered already is known by
the server alone, so that a kill between its answer and a note of ours cannot matter; a journal that was delivered whole
is removed.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dspark import __version__
from dspark.errors import DataError
from dspark.io.atomic import replace_tree
from dspark.io.jsonfile import read_model, write_model
from dspark.package.manifest import Digests
from dspark.registry.events import Ended, Entry, Event, PackageMade, Started

_JOURNAL = re.compile(r"^(?P<order>\d{8,})-.+$")
_ENTRY = re.compile(r"^\d{4,}\.json$")


@dataclass(frozen=True)
class Journal:
    """The events of one run so far."""

    folder: Path
    events: tuple[Event, ...]

    @property
    def started(self) -> Started:
        """Its first event."""
        first = self.events[0]
        if not isinstance(first, Started):
            raise DataError(f"{self.folder}: does not begin with the start of a run", _hint(self.folder))
        return first

    @property
    def ended(self) -> Ended | None:
        """How the run ended; None while it is under way, or if it was killed."""
        return next((event for event in self.events if isinstance(event, Ended)), None)

    @property
    def packages(self) -> tuple[PackageMade, ...]:
        """What is to be registered."""
        return tuple(event for event in self.events if isinstance(event, PackageMade))


class Spool:
    """The journals of a workspace.

    Args:
        folder: of the spool; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, run: str, build: str, command: str, events: Iterable[Event] = ()) -> Path:
        """Begin the journal of a run of this process, after all that are there, whatever the clock says.

        Args:
            events: that are in it from its first moment, after the start.
        Returns:
            its folder, for `append`.
        """
        order = 1 + max((int(path.name.partition("-")[0]) for path in self.folders()), default=0)
        folder = self.folder / f"{order:08d}-{run}"
        unfinished = self.folder / f".{folder.name}.part"
        for left in self.folder.glob(".*.part"):  # by those who were killed here
            shutil.rmtree(left, ignore_errors=True)
        started = Started(
            time=time.time(),
            journal=uuid.uuid4().hex,
            run=run,
            build=build,
            command=command,
            dspark_version=__version__,
            user=_user(),
            host=platform.node(),
            pid=os.getpid(),
        )
        for event in (started, *events):
            append(unfinished, event)
        replace_tree(unfinished, folder)
        return folder

    def folders(self) -> list[Path]:
        """All journals, in order."""
        found = [path for path in self.folder.glob("*") if _JOURNAL.match(path.name)] if self.folder.is_dir() else []
        return sorted(found, key=lambda path: (int(path.name.partition("-")[0]), path.name))

    def journals(self) -> tuple[list[Journal], list[DataError]]:
        """All journals, in order, and what is wrong with those that cannot be read."""
        found, broken = [], []
        for folder in self.folders():
            try:
                found.append(read_journal(folder))
            except DataError as error:
                if folder.is_dir():  # else it was delivered meanwhile
                    broken.append(error)
        return found, broken

    def orphans(self, under_way: Callable[[Started], bool]) -> list[Journal]:
        """Journals of runs that were killed: without an end, and nobody left to write it.

        Args:
            under_way: is a run that began like this still alive?
        """
        open_ended = [journal for journal in self.journals()[0] if journal.ended is None]
        dead = [journal for journal in open_ended if not under_way(journal.started)]
        # Read again: a run writes its end before it lets others see that it is over.
        still = (read_journal(journal.folder) for journal in dead if journal.folder.is_dir())
        return [journal for journal in still if journal.ended is None]

    def close_orphans(self, under_way: Callable[[Started], bool]) -> list[Journal]:
        """Write the missing end of runs that were killed.

        Returns:
            their journals as they were.
        """
        found = self.orphans(under_way)
        for journal in found:
            append(journal.folder, Ended(time=time.time(), status="KILLED", message="the process was killed"))
        return found

    def remove(self, journal: Journal) -> None:
        """Drop a journal that was delivered whole."""
        aside = self.folder / f".delivered-{journal.folder.name}"
        with contextlib.suppress(FileNotFoundError):
            journal.folder.rename(aside)  # at once: half a journal must never be read
        for left in self.folder.glob(".delivered-*"):  # also by those who were killed in between
            shutil.rmtree(left, ignore_errors=True)

    def awaits(self, build: str, digests: Digests) -> bool:
        """True if a package is the last one of its build that waits to be registered."""
        waiting = [package for journal in self.journals()[0] for package in journal.packages if package.build == build]
        return bool(waiting) and waiting[-1].names(digests)


def append(folder: Path, event: Event) -> None:
    """Add an event to a journal; it is on disk when this returns."""
    last = max((int(path.stem) for path in _entries(folder)), default=0)
    write_model(folder / f"{last + 1:04d}.json", Entry(number=last + 1, event=event))


def read_journal(folder: Path) -> Journal:
    """Read one journal.

    Raises:
        DataError: an event is missing, damaged or of another version; names the file.
    """
    hint = _hint(folder)
    paths = _entries(folder)
    entries = [read_model(path, Entry, DataError, hint) for path in paths]
    for expected, (path, entry) in enumerate(zip(paths, entries, strict=True), start=1):
        if entry.number != expected or int(path.stem) != expected:
            raise DataError(f"{path}: event {expected} of the journal is missing", hint)
    journal = Journal(folder, tuple(entry.event for entry in entries))
    if not entries:
        raise DataError(f"{folder}: a journal without events", hint)
    _ = journal.started
    return journal


def _entries(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("*.json") if _ENTRY.match(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.stem))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return str(os.getuid())


def _hint(folder: Path) -> str:
    return f"look at it, then remove it: rm -r {folder}; its package can be made and registered again by `dspark run`"
