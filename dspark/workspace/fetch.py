"""Bring a target into the workspace, in a child process so that a run in which nothing is to do loads no torch.

A receipt in `.dspark/targets/` says what was materialised from what; while it holds there is nothing to do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import FolderSource, TargetSpec
from dspark.config.resolve import read_target
from dspark.errors import DataError
from dspark.io.digest import digest_file, digest_json
from dspark.io.jsonfile import read_model, write_model
from dspark.io.progress import Progress
from dspark.targets.record import read_record
from dspark.workspace.layout import Workspace, find_workspace
from dspark.workspace.stage import reported

STAGE = "target"  # what results and logs call this step


class TargetReceipt(BaseModel):
    """What was materialised: from which declaration and source files, into which record and store files."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["dspark/target-receipt/1"] = Field(default="dspark/target-receipt/1", alias="schema")
    declared: str  # digest of the target's settings
    source: str  # digest of names, sizes and times of the source's files; of nothing for sources elsewhere
    record: str  # sha256 of targets/<name>.json
    stored: dict[str, int]  # bytes of each file in the store


def is_current(workspace: Workspace, spec: TargetSpec) -> bool:
    """True if the target was materialised from exactly this declaration and is still there, complete."""
    try:
        receipt = read_model(_path(workspace, spec.name), TargetReceipt)
        return receipt == _receipt(workspace, spec)
    except DataError:
        return False


def fetch_command(target: str) -> list[str]:
    """The command of the child process."""
    return [sys.executable, "-P", "-m", "dspark.workspace.fetch", target]


def fetch(workspace: Workspace, spec: TargetSpec, progress: Progress) -> None:
    """Materialise a target and write its receipt.

    Raises:
        DsparkError: as `targets.materialise`.
    """
    from dspark.targets.materialise import materialise

    materialise(spec, root=workspace.root, progress=progress)
    write_model(_path(workspace, spec.name), _receipt(workspace, spec))


def _receipt(workspace: Workspace, spec: TargetSpec) -> TargetReceipt:
    record = workspace.target_record(spec.name)
    folder = read_record(record).folder(workspace.root)
    return TargetReceipt(
        declared=digest_json(spec.model_dump(mode="json")),
        source=digest_json(_stamps(workspace, spec)),
        record=digest_file(record),
        stored={
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    )


def _stamps(workspace: Workspace, spec: TargetSpec) -> list[tuple[str, int, int]]:
    if not isinstance(spec.source, FolderSource):
        return []
    folder = workspace.root / Path(spec.source.path).expanduser()
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            found.append((path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns))
    return found


def _path(workspace: Workspace, target: str) -> Path:
    return workspace.state / "targets" / f"{target}.json"


def main() -> int:
    """The child process: `python -m dspark.workspace.fetch NAME`."""
    name = sys.argv[1]

    def work(progress: Progress) -> list[str]:
        workspace = find_workspace()
        fetch(workspace, read_target(workspace.root, name), progress)
        return [f"targets/{name}.json"]

    return reported(STAGE, name, work)


if __name__ == "__main__":
    raise SystemExit(main())
