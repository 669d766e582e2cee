"""What tests of faults share: a run that nobody disturbs, to compare with."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # sandbox.py

from sandbox import Sandbox

PACKAGE = "builds/tiny/package"
HALF = re.compile(r"^\..*\.part$|^\.replaced-")  # the names of io/atomic.py


@dataclass(frozen=True)
class Undisturbed:
    """A workspace before its first run, and what a run that nobody disturbs makes of it."""

    before: Path
    model_digest: str
    seconds: float


def copy_of(root: Path, destination: Path) -> Sandbox:
    shutil.copytree(root, destination, symlinks=True)
    return Sandbox(destination)


def model_digest(sandbox: Sandbox) -> str:
    """Of the workspace's package, which must be sound."""
    verified = sandbox.dspark("package", "verify", PACKAGE, "--json")
    assert verified.code == 0, verified.err
    shown = sandbox.dspark("package", "show", PACKAGE, "--json")
    return str(shown.json["digests"]["model_digest"])


def half_files(sandbox: Sandbox) -> list[str]:
    """What atomic writes leave when they are cut off, anywhere but in the folder of unfinished work."""
    work = sandbox.root / ".dspark/work"
    found = (path for path in sandbox.root.rglob("*") if HALF.search(path.name) and not path.is_relative_to(work))
    return [str(path.relative_to(sandbox.root)) for path in found if ".dvc" not in path.parts]


def rows_of(events: Path) -> list[dict[str, Any]]:
    """The whole lines that a run has written by now."""
    if not events.is_file():
        return []
    return [json.loads(line) for line in events.read_text(encoding="utf-8").split("\n")[:-1]]


def works(events: Path, stage: str) -> bool:
    """The stage has told of its work, or is over."""
    mine = [row for row in rows_of(events) if str(row.get("stage", "")).startswith(f"{stage}@")]
    return any(row["event"] in ("start", "progress", "stage_ended") for row in mine)
