"""The hidden folder beside a package's place in which its files gather until it is whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspark.errors import PreflightError
from dspark.package.layout import MANIFEST
from dspark.package.manifest import Manifest

_SPARE_BYTES = 64 * 2**20


def require_free(folder: Path) -> None:
    """Refuse a folder that holds something else than a package.

    Raises:
        PreflightError: as it says.
    """
    if folder.is_symlink():
        raise PreflightError(
            f"{folder} is a link", "name the folder itself, or a new one, and move the link afterwards"
        )
    if folder.exists() and not folder.is_dir():
        raise PreflightError(f"{folder} is not a folder", "name a new one")
    if folder.is_dir() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise PreflightError(f"{folder} holds something else than a package", "name a new folder, or an empty one")


@contextmanager
def gathering(folder: Path) -> Iterator[Path]:
    """The hidden folder that files gather in, held against other processes.

    Raises:
        PreflightError: another process fetches into the same place, or something else stands there.
    """
    part = folder.parent / f".{folder.name}.pull"
    while True:
        try:
            with suppress(FileExistsError):
                part.mkdir(parents=True)
            handle = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another pull has just finished with it
        except OSError as reason:
            raise PreflightError(
                f"{part}: {reason.strerror}", "name a folder where you may write, or remove what stands there"
            ) from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PreflightError(f"another process is fetching into {folder}", "wait for it") from None
            if not _same(part, handle):
                continue  # renamed into its place between opening and locking
            try:
                yield part
            finally:
                with suppress(OSError):
                    part.rmdir()  # if nothing was fetched
            return
        finally:
            os.close(handle)


def _same(part: Path, handle: int) -> bool:
    try:
        return os.path.samestat(part.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def prune(part: Path, manifest: Manifest) -> None:
    """Remove what an attempt for another package, or a killed one, left behind; afterwards there is no link in it."""
    listed = {entry.path for entry in manifest.files}
    for where, folders, files in os.walk(part):  # does not follow links
        below = Path(where)
        for name in [*files, *(name for name in folders if (below / name).is_symlink())]:
            path = below / name
            status = path.lstat()
            kept = path.relative_to(part).as_posix() in listed and stat.S_ISREG(status.st_mode)
            if not kept or status.st_nlink != 1:
                path.unlink()
    for path in sorted((path for path in part.rglob("*") if path.is_dir()), reverse=True):
        if path.relative_to(part).as_posix() in listed:
            shutil.rmtree(path)
        elif not any(path.iterdir()):
            path.rmdir()


def require_space(part: Path, manifest: Manifest) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        PreflightError: names what is needed and what is there.
    """
    missing = sum(entry.bytes for entry in manifest.files if not entry.made_from and not (part / entry.path).is_file())
    free = shutil.disk_usage(part).free
    if missing + _SPARE_BYTES > free:
        raise PreflightError(
            f"{part.parent}: {missing / 1e6:.0f} MB are to be fetched, {free / 1e6:.0f} MB are free",
            "free some space, or name a folder on another disk",
        )
