"""How a run ended reaches a disk that the run has filled; where it cannot, that is said once."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark.errors import PreflightError
from dspark.registry.publish import spool_of
from dspark.workspace.ending import ROOM_BYTES, set_room_aside, writing_the_end
from dspark.workspace.journal import RunJournal
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Silent
from dspark.workspace.results import RunRecord, new_run, read_record, write_record


class Heard(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, message: str) -> None:
        self.told.append(message)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace on a file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    yield Workspace(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until there is no room for another byte."""
    with path.open("wb", buffering=0) as handle, pytest.raises(OSError, match="No space left"):
        while True:
            handle.write(bytes(4096))


def test_a_run_that_filled_the_disk_is_not_called_killed_afterwards(small: Workspace) -> None:
    heard = Heard()
    set_room_aside(small)
    folder = new_run(small.runs, os.getpid())
    record = RunRecord(id=folder.name, build="b", pid=os.getpid(), started=1.0)
    write_record(folder, record)
    journal = RunJournal(small, spool_of(small.root), folder, record, heard)
    journal.stage_started("train@b")
    fill(small.root / "filler")
    with pytest.raises(OSError, match="No space left"):
        journal.end("FINISHED", 0)  # as publishing does; it did not come to that
    record.state, record.exit_code = "failed", 3
    with writing_the_end(small, heard):
        assert journal.end("FAILED", 3, "no room")
        write_record(folder, record)
    assert heard.told == []
    assert read_record(folder).state == "failed"
    (told,) = spool_of(small.root).journals()[0]
    assert told.ended is not None and (told.ended.status, told.ended.message) == ("FAILED", "no room")


def test_where_there_is_no_room_even_so_that_is_said_once(tmp_path: Path) -> None:
    heard = Heard()
    with writing_the_end(Workspace(tmp_path), heard):
        raise OSError(errno.ENOSPC, "x", "run.json")
    assert heard.told == [f"how this run ended could not be written down: run.json: {os.strerror(errno.ENOSPC)}"]


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing_the_end(Workspace(tmp_path), Heard()):
        raise FileNotFoundError(errno.ENOENT, "x", "run.json")


def test_room_is_taken_for_good_and_given_back(tmp_path: Path) -> None:
    """Blocks of 512 bytes, by stat(2): a file with a hole in it would give nothing back."""
    workspace = Workspace(tmp_path)
    set_room_aside(workspace)
    set_room_aside(workspace)  # one that was killed left its own: it is used again
    assert workspace.room_aside.stat().st_blocks * 512 >= ROOM_BYTES
    with writing_the_end(workspace, Heard()):
        assert not workspace.room_aside.exists()


def test_a_disk_that_is_full_before_a_run_begins_is_said(small: Workspace) -> None:
    small.state.mkdir()
    fill(small.root / "filler")
    with pytest.raises(PreflightError, match="No space left"):
        set_room_aside(small)
