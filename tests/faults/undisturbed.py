"""What tests of faults share: a run that nobody disturbs, to compare with."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # sandbox.py

from sandbox import Sandbox

PACKAGE = "builds/tiny/package"


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
