"""A lock between the processes of one machine that share a workspace's registry."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.errors import ServiceError
from dspark.io.progress import Progress


@contextmanager
def locked(path: Path, progress: Progress, *, timeout_seconds: float = 600.0) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system releases it when the process ends, however it ends.

    Raises:
        ServiceError: another process held it for longer than the timeout.
        Interrupted: a stop was requested while waiting.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + timeout_seconds
        while not _taken(handle):
            if time.monotonic() >= deadline:
                raise ServiceError(
                    f"{path}: another process has held the registry for {timeout_seconds:g} seconds",
                    "wait for the other `dspark run`, or end it",
                )
            progress.advance(0)
            time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
