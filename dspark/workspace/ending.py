"""How a run ended must reach the disk, also one that the run itself has filled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dspark.io.disk import disk_error, disk_errors
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Listener

ROOM_BYTES = 256 * 1024  # the run's record and the last events of its journal take a block or two each


def set_room_aside(workspace: Workspace) -> None:
    """Take room that `writing_the_end` gives back; call only while holding the run lock.

    Raises:
        PreflightError: the disk is full.
    """
    with disk_errors():
        workspace.room_aside.parent.mkdir(parents=True, exist_ok=True)
        with workspace.room_aside.open("wb") as handle:
            os.posix_fallocate(handle.fileno(), 0, ROOM_BYTES)


@contextmanager
def writing_the_end(workspace: Workspace, listener: Listener) -> Iterator[None]:
    """Give room for what is written here; if it cannot be written, say so: why the run ended is what must be raised."""
    try:
        workspace.room_aside.unlink(missing_ok=True)
        yield
    except OSError as reason:
        known = disk_error(reason)
        if known is None:
            raise
        listener.note(f"how this run ended could not be written down: {known.message}")
