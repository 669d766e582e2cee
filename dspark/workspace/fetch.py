"""Bring a target into the workspace, in a child process: a run in which nothing is to do loads no torch."""

from __future__ import annotations

import sys
from typing import NoReturn

from dspark.config.build import FOLDERS
from dspark.config.models import TargetSpec
from dspark.io.progress import Progress
from dspark.targets.catalogue import read_target
from dspark.targets.materialise import is_materialised, materialise
from dspark.workspace.layout import Workspace, find_workspace
from dspark.workspace.stage import end_process, reported

STAGE = "target"  # what results and logs call this step


def is_current(workspace: Workspace, spec: TargetSpec) -> bool:
    """True if the target's record and files are there as declared."""
    return is_materialised(spec, root=workspace.root)


def fetch_command(target: str) -> list[str]:
    """The command of the child process."""
    return [sys.executable, "-P", "-m", "dspark.workspace.fetch", target]


def main() -> NoReturn:
    """The child process: `python -m dspark.workspace.fetch NAME`."""
    name = sys.argv[1]

    def work(progress: Progress) -> list[str]:
        root = find_workspace().root
        materialise(read_target(root / FOLDERS["target"], name, root=root), root=root, progress=progress)
        return [f"targets/{name}.json"]

    end_process(reported(STAGE, name, work))


if __name__ == "__main__":
    main()
