"""One run per workspace, and the repair of what a killed DVC leaves behind.

The lock is an flock on `.dspark/run.lock`. The DVC child inherits it, so after a kill -9 of `dspark run` it stays
held until the stage that is still running has stopped at its next safe point (it notices by itself).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.errors import PreflightError
from dspark.io.atomic import write_bytes
from dspark.workspace.layout import Workspace

DVC_LOCK_COPY = "dvc.lock.last"
_OWNER_BYTES = 4096


@contextmanager
def run_lock(
    workspace: Workspace, purpose: str, note: Callable[[str], None], *, patience_seconds: float = 120.0
) -> Iterator[int]:
    """Hold the workspace; yields the file descriptor that child processes must inherit.

    Args:
        purpose: what for, for the message that others see.
        note: shows one line while waiting for an interrupted run to stop.
        patience_seconds: how long to wait for the children of a killed run.
    Raises:
        PreflightError: another run is under way, or a killed one does not stop.
    """
    workspace.state.mkdir(parents=True, exist_ok=True)
    handle = os.open(workspace.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(handle, note, patience_seconds)
        owner = json.dumps({"pid": os.getpid(), "purpose": purpose, "since": time.time()}).encode()
        os.pwrite(handle, owner.ljust(_OWNER_BYTES), 0)  # at once: whoever looks finds the old name or the new one
        yield handle
    finally:
        os.close(handle)


def holder(workspace: Workspace) -> dict[str, object] | None:
    """Who holds the workspace: `{pid, purpose, since}`, or None if it is free."""
    try:
        handle = os.open(workspace.lock, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(handle) or {"pid": 0, "purpose": "unknown", "since": 0.0}
    finally:
        os.close(handle)
    return None


def dvc_processes(workspace: Workspace) -> list[int]:
    """Process ids of living DVC commands that work in this workspace."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            inside = (folder / "cwd").resolve().is_relative_to(workspace.root)
        except OSError:
            continue  # it ended meanwhile, or is another user's
        if inside and any(Path(os.fsdecode(part)).name == "dvc" for part in arguments[:4]):
            found.append(int(folder.name))
    return found


def damaged_rwlock(workspace: Workspace) -> Path | None:
    """DVC's table of file locks if a kill in the middle of its rewriting left it empty or cut off."""
    path = _rwlock(workspace)
    return path if path.is_file() and not _is_json(path) else None


def _holds_locks(table: Path) -> bool:
    """False for what DVC leaves when it ends well: an empty table, or empty lists of readers and writers."""
    try:
        return any(json.loads(table.read_text(encoding="utf-8")).values())
    except (ValueError, AttributeError):
        return True


def repair_dvc(workspace: Workspace) -> list[str]:
    """Mend what a killed DVC left: its table of file locks, an unreadable `dvc.lock`.

    Call only while holding the run lock.

    Returns:
        one line per repair.
    """
    done = []
    table = _rwlock(workspace)
    if table.is_file() and _holds_locks(table) and not dvc_processes(workspace):
        # DVC forgives locks of processes that are gone, but takes zombies and reused process ids for living ones.
        readable = _is_json(table)
        table.unlink()
        done.append("removed file locks of a killed DVC" + ("" if readable else ", which it had left unreadable"))
    lock, copy = workspace.root / "dvc.lock", workspace.state / DVC_LOCK_COPY
    if lock.is_file() and not complete_lock_file(lock.read_bytes()):
        if copy.is_file():
            write_bytes(lock, copy.read_bytes())
            done.append("restored dvc.lock as of the last finished run: a killed DVC had left it cut off")
        else:
            shutil.move(lock, lock.with_name("dvc.lock.damaged"))
            done.append("moved dvc.lock to dvc.lock.damaged: a killed DVC had left it cut off")
    return done


def keep_dvc_lock(workspace: Workspace) -> None:
    """Keep a copy of the readable `dvc.lock` for `repair_dvc`."""
    lock, copy = workspace.root / "dvc.lock", workspace.state / DVC_LOCK_COPY
    if lock.is_file() and (not copy.is_file() or copy.read_bytes() != lock.read_bytes()):
        write_bytes(copy, lock.read_bytes())


def complete_lock_file(data: bytes) -> bool:
    """True if `dvc.lock` is whole YAML with the structure that DVC writes."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        value = YAML(typ="safe", pure=True).load(data)
    except (YAMLError, ValueError):
        return False
    if not isinstance(value, dict) or "schema" not in value or not isinstance(value.get("stages", {}), dict):
        return False
    return data.endswith(b"\n") and all(isinstance(entry, dict) for entry in value.get("stages", {}).values())


def _acquire(handle: int, note: Callable[[str], None], patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    attempts = 0
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            owner = _owner(handle)
        pid = int(str(owner["pid"])) if owner else 0
        if owner and Path(f"/proc/{pid}").exists():
            raise PreflightError(
                f"this workspace is in use: {owner['purpose']} (process {pid})",
                "watch it with `dspark status`, or stop it with Ctrl-C in its terminal",
            )
        if time.monotonic() > deadline:
            raise PreflightError(
                f"the stage of a run that was killed (process {pid}) does not stop", "end it: see `dspark doctor`"
            )
        attempts += 1
        if attempts == 2:  # at the first a run that has just begun may not have written its name yet
            note("waiting for the stage of a run that was killed to stop at its next safe point")
        time.sleep(0.2)


def _owner(handle: int) -> dict[str, object] | None:
    try:
        value = json.loads(os.pread(handle, _OWNER_BYTES, 0))
    except ValueError:
        return None  # it is being written
    return value if isinstance(value, dict) and "pid" in value else None


def _rwlock(workspace: Workspace) -> Path:
    return workspace.root / ".dvc" / "tmp" / "rwlock"


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True
