"""Open a file below a folder that somebody else may have filled: no link is followed, no pipe is waited on."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path


@contextmanager
def open_below(folder: Path, path: str) -> Iterator[BufferedReader]:
    """Open a regular file below `folder`, which itself may be named through a link.

    Args:
        path: relative, with slashes.
    Raises:
        OSError: it is missing, or a link stands on the way.
        ValueError: it is no regular file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    *parents, name = path.split("/")
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            inner = os.open(parent, flags | os.O_DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        handle = os.fdopen(os.open(name, flags, dir_fd=directory), "rb")
    finally:
        os.close(directory)
    with handle:
        if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
            raise ValueError("is not a regular file")
        yield handle
