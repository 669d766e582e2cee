"""A workspace in a temporary folder, and `dspark` in it as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.workspace.layout import Workspace

CHECKOUT = Path(__file__).resolve().parents[2]
PLACE = "wörk späce 工房"  # what workspaces of tests are called: blanks and letters beyond ASCII are everywhere
FILES = ("dvc.yaml", "params.yaml", "pipeline", "serving_profiles", "stages", ".dvc/config", ".dvcignore")


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Sandbox:
    """A workspace in a temporary folder, and `dspark` in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workspace = Workspace(root)

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DSPARK_", "DVC_"))}
        path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if part)
        # Tests share the cores: threads that spin while they wait for each other would take minutes for seconds.
        return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": path, **variables}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "dspark", *arguments]

    def dspark(self, *arguments: str, timeout: float = 120, cwd: Path | None = None, **variables: str) -> Finished:
        done = subprocess.run(
            self.command(*arguments),
            cwd=cwd or self.root,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.root,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Under nohup the tests ignore it, and what they start would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def processes(self) -> dict[int, str]:
        """Living processes that work in the workspace, and their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                inside = (folder / "cwd").resolve() == self.root
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if inside and command:
                found[int(folder.name)] = command
        return found

    def kill(self) -> None:
        """SIGKILL to all of them."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # its parent's death may have ended it
                os.kill(pid, signal.SIGKILL)

    def wait_for(
        self, condition: Callable[[], bool], child: subprocess.Popen[str] | None = None, seconds: float = 60
    ) -> None:
        """Until the condition holds; fails when the time is up or the child has ended."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            assert child is None or child.poll() is None, child.communicate()
            time.sleep(0.02)

    def edit(self, path: str, change: Callable[[str], str]) -> None:
        file = self.root / path
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")


def make_sandbox(root: Path) -> Sandbox:
    root.mkdir()
    copy_workspace(root)
    return Sandbox(root)


def copy_workspace(root: Path) -> None:
    for name in FILES:
        source, destination = CHECKOUT / name, root / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, destination, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, destination)
