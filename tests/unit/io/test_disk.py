"""A disk that is full, read-only or failing: nothing half written stays, and the error says what mends it."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.errors import DataError, PreflightError
from dspark.io.atomic import atomic_path, replaced_tree, write_bytes
from dspark.io.digest import digest_tree
from dspark.io.disk import disk_error, disk_errors
from dspark.io.jsonlines import write_jsonlines
from dspark.io.progress import EventProgress


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO])
def test_an_error_of_the_disk_names_the_file_and_what_mends_it(number: int) -> None:
    found = disk_error(OSError(number, "whatever", "some/file"))
    assert isinstance(found, PreflightError) and found.exit_code == 3
    assert found.message == f"some/file: {os.strerror(number)}" and found.hint


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "x", "f"),
        OSError(errno.ECONNREFUSED, "x"),
        OSError("text"),
        ValueError("No space"),
        KeyError(28),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert disk_error(error) is None
    with pytest.raises(type(error)) as caught, disk_errors():
        raise error
    assert caught.value is error


def test_who_knew_more_is_not_overruled() -> None:
    known = DataError("rows.jsonl: [Errno 28] in a text", "mend it")
    with pytest.raises(DataError) as caught, disk_errors():
        raise known
    assert caught.value is known


def limited(size: int, work: Callable[[], None]) -> int:
    """The exit code of `work` in a process that may write no file beyond `size` bytes: 0, or 9 for an error of a disk.

    The system refuses the write in the middle, whoever asks it: Python, or Rust behind safetensors.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            work()
            code = 0
        except Exception as error:
            known = disk_error(error)
            code = 9 if known is not None and "ulimit -f" in known.hint else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_write_that_breaks_off_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    def weights() -> None:
        with atomic_path(tmp_path / "file") as temporary:
            save_file({"weights": np.zeros(100_000)}, temporary)

    def copied() -> None:
        with replaced_tree(tmp_path / "folder") as folder:
            shutil.copytree(tmp_path / "source", folder / "inner")

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "large").write_bytes(bytes(100_000))
    (tmp_path / "folder").mkdir()
    write_bytes(tmp_path / "file", b"old")
    before = digest_tree(tmp_path)
    rows = [{"row": number} for number in range(10_000)]
    works = (
        lambda: write_bytes(tmp_path / "file", bytes(100_000)),
        lambda: write_jsonlines(tmp_path / "file", rows),
        weights,
        copied,
    )
    for work in works:
        assert limited(50_000, work) == 9
        assert digest_tree(tmp_path) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "source"]
    for work in works:
        assert limited(10_000_000, work) == 0


def test_on_a_full_disk_the_file_is_named_and_the_old_one_stays(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(256 * 1024)
    write_bytes(disk / "file", b"old")
    with pytest.raises(PreflightError) as caught, disk_errors():
        write_bytes(disk / "file", bytes(1024 * 1024))
    assert caught.value.message == f"{disk / 'file'}: No space left on device"
    assert "make room" in caught.value.hint
    assert [path.name for path in disk.iterdir()] == ["file"] and (disk / "file").read_bytes() == b"old"


def test_progress_that_cannot_be_written_stops_no_work(tmp_path: Path) -> None:
    progress = EventProgress(tmp_path / "nowhere" / "events.jsonl", "train")
    progress.start("train", 3)
    progress.advance()
    progress.note("still here")


def test_results_that_no_disk_takes_are_said_once(tmp_path: Path) -> None:
    """`/dev/full` is always full. Python would complain again at its end, and with another exit code."""
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "dspark", "version", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "Error: No space left on device" and "Exception ignored" not in done.stderr


def test_sqlites_words_for_a_full_disk_are_known_and_what_to_do_then_can_be_named() -> None:
    """SQLite numbers its errors itself; the text is that of its SQLITE_FULL."""
    known = disk_error(RuntimeError("(sqlite3.OperationalError) database or disk is full"), "dspark registry sync")
    assert known is not None and known.exit_code == 3
    assert known.hint.startswith("make room") and known.hint.endswith("then dspark registry sync")
