"""Child processes in a group of their own, so that a stop reaches every one of them and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import dspark
from dspark.errors import Interrupted
from dspark.io.progress import request_stop, stop_requested
from dspark.workspace.layout import Workspace

# What a stage is told of the run that started it.
RUN_ID, RUN_PID, EVENTS, DEBUG = "DSPARK_RUN_ID", "DSPARK_RUN_PID", "DSPARK_EVENTS", "DSPARK_DEBUG"
Tick = Callable[[], None]
POLL_SECONDS = 0.1
_WITHHELD = ("DVC_", "MLFLOW_", "DSPARK_TRACKING_", "AWS_")


def child_environment(workspace: Workspace, run: Path | None, *, debug: bool = False) -> dict[str, str]:
    """The environment of DVC and of every stage: this interpreter, this dspark, no telemetry, caches inside.

    Args:
        run: folder of the run that results, logs and events go to; None: a child that reports nothing.
    """
    # What a stage does not know of a tracking server and its store, no library in it can send there.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_WITHHELD)}
    environment = {
        **inherited,
        "DVC_NO_ANALYTICS": "1",
        "DVC_SITE_CACHE_DIR": str(workspace.dvc_cache),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "SHELL": "/bin/sh",  # DVC runs commands with it
    }
    source = Path(dspark.__file__).resolve().parent.parent
    if source not in {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}:
        environment["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(source), os.environ.get("PYTHONPATH", "")) if part
        )
    if run is not None:
        environment |= {RUN_ID: run.name, RUN_PID: str(os.getpid()), EVENTS: str(run / "events.jsonl")}
    if debug:
        environment[DEBUG] = "1"
    return environment


class Stopper:
    """Passes stop signals on to the running child group; the third one kills it.

    Use as `with stopping(note) as stopper`; `stopper.run(...)` runs one child at a time.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._group: int | None = None
        self._signals = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self._signals += 1
        request_stop()
        if self._group is None:
            if self._signals > 1:
                raise Interrupted(f"stopped by {signal.Signals(number).name}")
            return
        if self._signals == 1:
            self._note("stopping at the next safe point; again to stop at once")
        # DVC ignores SIGINT while a command runs but dies of SIGTERM, which would orphan the command.
        _signal_group(self._group, signal.SIGINT if self._signals < 3 else signal.SIGKILL)

    def run(
        self,
        command: Sequence[str],
        *,
        workspace: Workspace,
        environment: Mapping[str, str],
        log: Path,
        keep_open: Sequence[int] = (),
        tick: Tick = lambda: None,
    ) -> int:
        """Run a command in a group of its own until the whole group is gone.

        Args:
            log: file that its output is appended to.
            keep_open: file descriptors that it inherits.
            tick: called several times a second.
        Returns:
            the command's exit code, negative for a signal.
        Raises:
            Interrupted: a stop was requested and the group has ended.
        """
        check_stop()
        with log.open("ab") as output:
            child = subprocess.Popen(
                command,
                cwd=workspace.root,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(keep_open),
                start_new_session=True,
            )
        self._group = child.pid
        try:
            if stop_requested():  # the signal came between the check and the start
                _signal_group(child.pid, signal.SIGINT)
            while child.poll() is None:
                tick()
                time.sleep(POLL_SECONDS)
            self._wait_for_group(child.pid, tick)
            tick()
        except BaseException:
            # Whoever listens failed, on a full disk for instance: nobody may work on unwatched.
            self._wait_for_group(child.pid, lambda: None)
            child.wait()
            raise
        finally:
            self._group = None
        check_stop()
        return child.returncode

    def _wait_for_group(self, group: int, tick: Tick) -> None:
        """Wait for what the command left running (after a kill of DVC alone: the stage), asking it to stop."""
        asked = False
        while group_members(group):
            if not asked:
                _signal_group(group, signal.SIGINT)
                asked = True
            tick()
            time.sleep(POLL_SECONDS)


def check_stop() -> None:
    """A safe point between two phases of a run.

    Raises:
        Interrupted: if a stop was requested.
    """
    if stop_requested():
        raise Interrupted("stopped")


@contextmanager
def stopping(note: Callable[[str], None]) -> Iterator[Stopper]:
    """Install a `Stopper` for SIGINT, SIGTERM and SIGHUP for the duration of the block."""
    stopper = Stopper(note)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup a run outlives its terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stopper.on_signal) for number in numbers}
    try:
        yield stopper
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def group_members(group: int) -> list[int]:
    """Living processes of a process group; zombies do not count."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, members = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if int(members) == group and state not in "ZX":
            found.append(int(folder.name))
    return found


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # it is gone, which is what was wanted
