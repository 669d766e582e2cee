"""Writes that are either complete or absent: temporary file beside the target, fsync, rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.errors import DsparkError
from dspark.io.disk import error_number


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed over `path`, on failure removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        _fsync(temporary)
        temporary.replace(path)
        _fsync(path.parent)
    except OSError as reason:
        if reason.errno is not None and reason.filename is None:
            reason.filename = str(path)  # a write that fails does not say of which file
        raise
    except Exception as reason:
        number = error_number(reason)  # of a library that writes without Python's help
        if number is not None and not isinstance(reason, DsparkError):
            raise OSError(number, os.strerror(number), str(path)) from reason
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_if_changed(path: Path, text: str) -> bool:
    """Write `text` unless the file already holds it, so that its modification time means something.

    Returns:
        True if the file was written.
    """
    if path.is_file() and path.read_bytes() == text.encode("utf-8"):
        return False
    write_text(path, text)
    return True


def replace_tree(source: Path, destination: Path) -> None:
    """Move the finished folder or file `source` to `destination` (same filesystem) in place of what is there.

    What stood at `destination` is moved aside first and removed last, so a kill leaves either the old or the new.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside: Path | None = None
    if destination.exists() or destination.is_symlink():
        aside = Path(tempfile.mkdtemp(dir=source.parent, prefix=".replaced-")) / destination.name
        destination.replace(aside)
    source.replace(destination)
    _fsync(destination.parent)
    if aside is not None:
        shutil.rmtree(aside.parent, ignore_errors=True)


def unfinished_folder(destination: Path) -> Path:
    """The hidden folder beside `destination` in which its new content is made; whoever is killed leaves it behind."""
    return destination.with_name(f".{destination.name}.unfinished")


@contextmanager
def replaced_tree(destination: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it takes the place of `destination`, on failure nothing is left of it.

    What a killed process left there is removed first (`clear_unfinished`).
    """
    clear_unfinished(destination)
    scratch = unfinished_folder(destination)
    folder = scratch / destination.name
    try:
        folder.mkdir(parents=True)
        yield folder
        replace_tree(folder, destination)
    finally:
        clear_unfinished(destination)


def clear_unfinished(destination: Path) -> int | None:
    """Remove the hidden folder of `destination`; what stood there before is put back if a kill came between the moves.

    Returns:
        the bytes that were removed, None if there was no such folder.
    """
    scratch = unfinished_folder(destination)
    if not scratch.is_dir():
        return None
    for aside in scratch.glob(f".replaced-*/{destination.name}"):
        if not destination.exists():
            aside.replace(destination)
    size = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    shutil.rmtree(scratch, ignore_errors=True)
    return size


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
