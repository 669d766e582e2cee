"""`dspark init`: the files of a workspace from the installed dspark into a folder, and later what a newer one changes.

The files are the checkout's own; a wheel carries them under `dspark/_workspace`. What was written is remembered by
digest in `.dspark.json`, which belongs to version control: by it an upgrade tells what a newer dspark changed from what
was edited here, and leaves edits alone.
"""

from __future__ import annotations

import contextlib
import difflib
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

import dspark
from dspark.errors import PreflightError
from dspark.io.atomic import write_bytes
from dspark.io.digest import digest_bytes
from dspark.io.jsonfile import model_json, pretty_json, read_model
from dspark.workspace.layout import MARKS, Workspace
from dspark.workspace.lock import run_lock

# What a workspace begins with, as pyproject.toml puts it into the wheel (a test compares the two).
IGNORED = ".gitignore"
CONTENT = (
    "dvc.yaml",
    "params.yaml",
    "pipeline",
    "stages",
    "serving_profiles",
    ".dvc/config",
    ".dvc/.gitignore",
    ".dvcignore",
    IGNORED,
)
RECORD = ".dspark.json"
BESIDE = ".new"  # how dspark's version of a file is called that was edited here
_MADE = "# made by"  # what begins the lines of .gitignore that concern a workspace; those above are the library's
_NEEDED = ("dvc.yaml", "stages/", ".dvc/", ".dvcignore")  # restored where removed; what else was removed stays so


class Record(BaseModel):
    """What `dspark init` wrote: the version, and the sha256 of every file; `.gitignore` is not among them.

    Attributes:
        ignores: whether lines that `.gitignore` lacks are dspark's to add.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["dspark/scaffold/1"] = Field(default="dspark/scaffold/1", alias="schema")
    version: str
    files: dict[str, str]
    ignores: bool = True


@dataclass(frozen=True)
class Change:
    """What this dspark would change in a file.

    Attributes:
        path: below the workspace.
        kind: `new` here; `changed` by dspark alone; `edited` here as well (or nobody knows), so it stays as it is and
            dspark's version goes beside it.
        diff: from the file here to dspark's, unified.
    """

    path: str
    kind: Literal["new", "changed", "edited"]
    diff: str

    @property
    def written(self) -> str:
        """The file that applying it writes."""
        return f"{self.path}{BESIDE}" if self.kind == "edited" else self.path


def scaffold(folder: Path, *, git: bool | None = None) -> list[str]:
    """Make a workspace of a folder that may hold anything else; all of it, or nothing.

    Args:
        folder: made if it is not there.
        git: True: make a repository of it if it is in none; False: leave `.gitignore` alone.
    Returns:
        the files that were written; of a workspace that is complete already, none.
    Raises:
        PreflightError: files that differ are in the way, it lies inside a workspace, or git is missing.
    """
    folder = folder.absolute()
    files, ignored = _template()
    _refuse_inside(folder)
    _refuse_in_the_way(folder, files)
    wanted = {name: data for name, data in files.items() if not (folder / name).is_file()}
    if git is not False and (lines := _with_lines(folder / IGNORED, ignored)) is not None:
        wanted[IGNORED] = lines
    if wanted or not (folder / RECORD).is_file():
        wanted[RECORD] = _record(files, ignores=git is not False)
    with _all_or_none(folder) as write:
        for name, data in wanted.items():
            write(name, data)
        if git:
            _make_repository(folder)
    return sorted(wanted.keys() - {RECORD})


def changes(workspace: Workspace) -> list[Change]:
    """What this dspark would change in a workspace; nothing is written."""
    return [change for change, _ in _compared(workspace)]


def upgrade(workspace: Workspace, note: Callable[[str], None]) -> list[Change]:
    """Apply these changes, all or none; files that were edited here get dspark's version beside them.

    Args:
        note: told while an interrupted run is waited for.
    Raises:
        PreflightError: a run is under way.
    """
    with run_lock(workspace, "dspark init --upgrade", note):
        found = _compared(workspace)
        files, _ = _template()
        record = _read_record(workspace)
        with _all_or_none(workspace.root) as write:
            for change, data in found:
                write(change.written, data)
            write(RECORD, _record(files, ignores=record is None or record.ignores))
    return [change for change, _ in found]


def written_by(workspace: Workspace) -> str | None:
    """The version of dspark that wrote the workspace's files, None if nobody wrote that down.

    Raises:
        PreflightError: `.dspark.json` is damaged.
    """
    record = _read_record(workspace)
    return record.version if record is not None else None


def _template() -> tuple[dict[str, bytes], list[str]]:
    """The files of a workspace, and the lines that its `.gitignore` must have.

    Raises:
        PreflightError: this installation has none.
    """
    package = Path(dspark.__file__).resolve().parent
    shipped = package / "_workspace"
    root = shipped if shipped.is_dir() else package.parent
    files: dict[str, bytes] = {}
    for name in CONTENT:
        path = root / name
        if not path.exists():
            raise PreflightError(
                f"this installation of dspark lacks {path}", "install it again: pip install --force-reinstall dspark"
            )
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix != ".pyc":
                files[file.relative_to(root).as_posix()] = file.read_bytes()
    lines = files.pop(IGNORED).decode("utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(_MADE))
    return files, lines[first:]


def _compared(workspace: Workspace) -> list[tuple[Change, bytes]]:
    """What differs from this dspark's files for another reason than an edit here, with dspark's content."""
    files, ignored = _template()
    record = _read_record(workspace)
    known = record.files if record is not None else {}
    found = []
    for name, data in files.items():
        path = workspace.root / name
        if not path.is_file():
            if name in known and not name.startswith(_NEEDED):
                continue  # it was removed here
            found.append((Change(name, "new", _diff(name, b"", data)), data))
            continue
        here = path.read_bytes()
        if here == data or known.get(name) == digest_bytes(data):
            continue  # the same, or only edited here
        kind: Literal["changed", "edited"] = "changed" if known.get(name) == digest_bytes(here) else "edited"
        found.append((Change(name, kind, _diff(name, here, data)), data))
    path = workspace.root / IGNORED
    ours = (record is None or record.ignores) and path.is_file()
    if ours and (lines := _with_lines(path, ignored)) is not None:
        found.append((Change(IGNORED, "changed", _diff(IGNORED, path.read_bytes(), lines)), lines))
    return found


def _diff(name: str, here: bytes, there: bytes) -> str:
    old, new = (data.decode("utf-8", errors="replace").splitlines() for data in (here, there))
    lines = difflib.unified_diff(old, new, f"here/{name}", f"dspark {dspark.__version__}/{name}", lineterm="")
    return "\n".join(lines)


def _record(files: Mapping[str, bytes], *, ignores: bool) -> bytes:
    digests = {name: digest_bytes(data) for name, data in files.items()}
    record = Record(version=dspark.__version__, files=digests, ignores=ignores)
    return pretty_json(model_json(record)).encode()


def _read_record(workspace: Workspace) -> Record | None:
    path = workspace.root / RECORD
    hint = f"restore it from git, or: rm {shlex.quote(str(path))}"
    return read_model(path, Record, PreflightError, hint) if path.is_file() else None


def _refuse_inside(folder: Path) -> None:
    """A workspace inside another would be walked by the outer one's DVC, and found by accident."""
    for parent in folder.resolve().parents:
        if parent.exists() and not parent.is_dir():
            raise PreflightError(f"{parent} is a file", "name another folder: dspark init DIR")
        if all((parent / mark).exists() for mark in MARKS):
            raise PreflightError(
                f"{folder} lies inside the workspace {parent}",
                f"use that one (cd {shlex.quote(str(parent))}), or name a folder outside: dspark init DIR",
            )


def _refuse_in_the_way(folder: Path, files: Mapping[str, bytes]) -> None:
    blocking = [name for name, data in files.items() if _blocks(folder, name, data)]
    if not blocking:
        return
    if all((folder / mark).exists() for mark in MARKS):
        raise PreflightError(
            f"{folder} is a workspace already; {len(blocking)} of its files differ from those of dspark "
            f"{dspark.__version__}: {_some(blocking)}",
            f"see how: dspark init --upgrade {shlex.quote(str(folder))}",
        )
    own = shlex.quote(str(folder / "dspark-workspace"))
    raise PreflightError(
        f"{folder}: in the way of a workspace: {_some(blocking)}",
        f"nothing was written; give the workspace a folder of its own: dspark init {own}",
    )


def _blocks(folder: Path, name: str, data: bytes) -> bool:
    """Whether something else stands where a file, or a folder above it, must be; a link leads elsewhere."""
    path = folder / name
    above = [parent for parent in path.parents if parent.is_relative_to(folder)]
    if any(parent.exists() and not parent.is_dir() for parent in above):
        return True
    if path.is_symlink() or any(parent.is_symlink() for parent in above if parent != folder):
        return True
    return path.exists() and (not path.is_file() or path.read_bytes() != data)


def _some(names: list[str], shown: int = 6) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def _with_lines(path: Path, lines: list[str]) -> bytes | None:
    """A `.gitignore` with the lines that it lacks at its end; None if it lacks none.

    What is there stays to the byte: it is the user's, in whatever encoding and with whatever ends of lines.
    """
    data = path.read_bytes() if path.is_file() else b""
    there = {line.strip() for line in data.splitlines()}
    missing = [line for line in map(str.encode, lines) if line.strip() and line.strip() not in there]
    if not missing:
        return None
    end = b"\r\n" if b"\r\n" in data else b"\n"
    if data and not data.endswith(b"\n"):
        data += end
    return data + b"".join(line + end for line in missing)


def _make_repository(folder: Path) -> None:
    if any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return
    try:
        done = subprocess.run(["git", "init", "--quiet"], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PreflightError("git is not installed", "install it, or leave --git out") from None
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"it ended with {done.returncode} and said nothing"]
        raise PreflightError(f"git init: {told[-1]}", "leave --git out")


@contextmanager
def _all_or_none(folder: Path) -> Iterator[Callable[[str, bytes], None]]:
    """Yield what writes a file below a folder; on failure everything is as it was before."""
    before: dict[Path, bytes | None] = {}
    made: list[Path] = []

    def write(name: str, data: bytes) -> None:
        path = folder / name
        for parent in reversed(path.parents):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        before[path] = path.read_bytes() if path.is_file() else None
        write_bytes(path, data)

    try:
        yield write
    except BaseException:
        for path, data in before.items():
            with contextlib.suppress(OSError):  # what failed is told; the rest of the way back is still to go
                path.unlink(missing_ok=True) if data is None else write_bytes(path, data)
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
