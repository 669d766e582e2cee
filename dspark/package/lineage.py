"""`evidence/lineage.json`: which code, with which library versions, from which locked inputs (package.md)."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from dspark import __version__
from dspark.config.models import Digest
from dspark.io.digest import digest_file
from dspark.package.manifest import Part, Text

_LIBRARIES = ("numpy", "torch", "transformers", "accelerate", "safetensors", "onnx", "onnxruntime", "mlflow", "dvc")


class Lineage(Part):
    """`dspark/lineage/1`. What could not be determined is absent with a reason beside it."""

    schema_: Literal["dspark/lineage/1"] = Field(default="dspark/lineage/1", alias="schema")
    dspark_version: Text
    python_version: Text
    platform: Text
    versions: dict[str, Text]  # of the libraries that are installed
    git_commit: Text | None = None
    git_dirty: bool | None = None
    git_absent: Text | None = None  # why there is no commit
    dvc_lock_sha256: Digest | None = None
    dvc_lock_absent: Text | None = None  # why there is no digest

    @model_validator(mode="after")
    def _absent_has_a_reason(self) -> Lineage:
        if (self.git_commit is None) != (self.git_dirty is None) or (self.git_commit is None) == (not self.git_absent):
            raise ValueError("either git_commit and git_dirty are known, or git_absent says why not")
        if (self.dvc_lock_sha256 is None) == (not self.dvc_lock_absent):
            raise ValueError("either dvc_lock_sha256 is known, or dvc_lock_absent says why not")
        return self


def gather_lineage(root: Path) -> Lineage:
    """The lineage of what is made in the workspace `root` now.

    Args:
        root: the workspace; its git repository and `dvc.lock` are looked at, never changed.
    """
    commit, dirty, reason = _git_state(root)
    lock = root / "dvc.lock"
    return Lineage(
        dspark_version=__version__,
        python_version=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}",
        versions=_versions(),
        git_commit=commit,
        git_dirty=dirty,
        git_absent=reason,
        dvc_lock_sha256=digest_file(lock) if lock.is_file() else None,
        dvc_lock_absent=None if lock.is_file() else "the workspace has no dvc.lock",
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # not installed: it cannot have taken part
    return found


def _git_state(root: Path) -> tuple[str | None, bool | None, str | None]:
    """(commit, dirty, None), or (None, None, why there is no commit)."""
    try:
        commit = _git(root, "rev-parse", "--verify", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain"))
    except FileNotFoundError:
        return None, None, "git is not installed"
    except subprocess.TimeoutExpired:
        return None, None, "git did not answer"
    except subprocess.CalledProcessError:
        return None, None, "the workspace is not in a git repository with a commit"
    return commit, dirty, None


def _git(root: Path, *arguments: str) -> str:
    # The optional locks are off: looking must not write into the repository's index.
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    environment = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=environment)
    return result.stdout.strip()
