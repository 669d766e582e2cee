"""A disk that is full, read-only or failing is the user's to mend: what such an error means, and what mends it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from dspark.errors import DsparkError, PreflightError

_AGAIN = "give the same command again: it goes on from here"
_ROOM = "make room (what runs made lies in .dspark, .dvc/cache, corpora and builds), then {again}"
_RIGHTS = "change its permissions or mount it for writing, then {again}"
_HINTS = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`), or use another file system",
    errno.EROFS: _RIGHTS,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EIO: "the disk itself may be failing: see `dmesg`",
}
_SQLITE = {"database or disk is full": errno.ENOSPC}


def error_number(error: BaseException) -> int | None:
    """The system's number of an error of a disk; None for errors that are about something else."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _HINTS else None
    # What writes without Python's help (safetensors), and copies of whole folders, hold the system's error as text.
    text = str(error)
    said = next((one for one in _HINTS if f"(os error {one})" in text or f"[Errno {one}]" in text), None)
    return said or next((number for words, number in _SQLITE.items() if words in text), None)


def disk_error(error: BaseException, again: str = "") -> DsparkError | None:
    """What an error says of a disk, with the file if that is known; None for errors that are about something else.

    Args:
        again: what to do once it is mended, if that is not the same command.
    """
    number = error_number(error)
    if number is None:
        return None
    said = str(error)
    if isinstance(error, OSError) and error.errno is not None:
        said = os.strerror(number)
        where = error.filename if error.filename2 is None else error.filename2
        if isinstance(where, str | bytes):
            said = f"{os.fsdecode(where)}: {said}"
    return PreflightError(said, _HINTS[number].format(again=again or _AGAIN))


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn errors of a disk into errors that say what mends them; all others pass.

    Raises:
        PreflightError: the disk is full, read-only or failing.
    """
    try:
        yield
    except DsparkError:
        raise  # whoever raised it knew more
    except Exception as error:
        if known := disk_error(error):
            raise known from error
        raise
