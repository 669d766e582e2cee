"""DVC's remote: what stages made in one workspace need not be made in another (`dspark remote push`, `remote pull`).

What travels are the outputs that `dvc.lock` names. The weights of targets and the features lie in the store, which DVC
does not see; a target is fetched again, and features are made again only when something that reads them is.

DVC reads its stages over `.dspark/dag.json`, which is generated and in no repository, so it is written first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspark.errors import DsparkError, PreflightError, ServiceError
from dspark.workspace.dvc import prepare_cache, stages_that_ran
from dspark.workspace.graph import Instance, instances, write_dag
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Listener
from dspark.workspace.lock import keep_dvc_lock, repair_dvc, run_lock
from dspark.workspace.process import child_environment, stopping
from dspark.workspace.run import Request, resolve_request

Direction = Literal["push", "pull"]

# What a store of objects asks of those who use it; stages are not told.
_CREDENTIALS = "AWS_"
_COPIED = re.compile(r"(?P<count>\d+) files? (?:pushed|fetched)")
_NO_REMOTE = "No remote provided"
_NOT_INSTALLED = re.compile(r"is supported, but requires '(?P<package>[^']+)' to be installed")
_UNSAVED = "unsaved files"
_INCOMPLETE = re.compile(
    r"Some of the cache files do not exist|Checkout failed for following targets"
    r"|failed to transfer '[^']*' - (\[Errno 2\]|.*\bNoSuchKey\b)"
)


@dataclass(frozen=True)
class Transfer:
    """What came of it.

    Attributes:
        build: whose stages.
        direction: `push` or `pull`.
        files: how many were copied; the others were there.
        stages: `stage@key`, whose outputs are at both ends now.
        unmade: stages of the build that `dvc.lock` does not know: nobody has made them, or nobody committed it.
    """

    build: str
    direction: Direction
    files: int
    stages: tuple[str, ...]
    unmade: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": "dspark/remote/1",
            "build": self.build,
            "direction": self.direction,
            "files": self.files,
            "stages": list(self.stages),
            "unmade": list(self.unmade),
        }


def transfer(workspace: Workspace, request: Request, direction: Direction, listener: Listener) -> Transfer:
    """Copy the outputs of a build's stages to DVC's default remote, or from it; what is there is not copied again.

    Raises:
        SettingsError: no such build.
        PreflightError: `dvc.lock` knows no stage of it, no remote is set, a package that DVC needs is missing, the
            remote lacks something that `dvc.lock` names, or outputs here that nobody recorded stand in the way.
        ServiceError: the remote cannot be reached, or refuses.
        Interrupted: what was copied stays.
    """
    pipeline = resolve_request(workspace, request)
    build = pipeline.chosen.name
    planned = instances(pipeline.chosen)
    log = workspace.state / "remote.log"
    with (
        stopping(listener.note) as stopper,
        run_lock(workspace, f"dspark remote {direction} of build {build!r}", listener.note) as lock,
    ):
        for line in repair_dvc(workspace):
            listener.note(line)
        recorded = stages_that_ran(workspace)
        names = tuple(instance.name for instance in planned if instance.name in recorded)
        if not names:
            raise _nothing_recorded(build, direction)
        write_dag(workspace, pipeline)
        prepare_cache(workspace)
        log.unlink(missing_ok=True)
        code = stopper.run(
            # The stages by name: DVC stops at one that was never made.
            [sys.executable, "-m", "dvc", "--wait-for-lock", direction, *names],
            workspace=workspace,
            environment=child_environment(workspace, None) | _credentials(),
            log=log,
            keep_open=(lock,),
        )
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if (error := _failure(code, lines, build, direction, log)) is not None:
            raise error
        absent = _absent(workspace, planned, names)
        if absent:
            raise _incomplete(build, ", ".join(absent))
        keep_dvc_lock(workspace)
    unmade = tuple(instance.name for instance in planned if instance.name not in recorded)
    copied = [int(match["count"]) for match in map(_COPIED.search, lines) if match]
    return Transfer(build, direction, sum(copied), names, unmade)


def _credentials() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_CREDENTIALS)}


def _absent(workspace: Workspace, planned: Sequence[Instance], names: Sequence[str]) -> list[str]:
    """Recorded stages whose output is not here."""
    return [
        instance.name
        for instance in planned
        if instance.name in names
        and not (workspace.root / instance.stage.output(instance.key, instance.entry)).exists()
    ]


def _failure(code: int, lines: Sequence[str], build: str, direction: Direction, log: Path) -> DsparkError | None:
    """What DVC's output says went wrong, or None; without a remote it ends well and has done nothing."""
    text = "\n".join(lines)
    if _NO_REMOTE in text or "no remote specified" in text.lower():
        return PreflightError(
            "DVC has no default remote here", "name one: dvc remote add --default NAME s3://BUCKET/FOLDER"
        )
    if code == 0:
        return None
    if missing := _NOT_INSTALLED.search(text):
        return PreflightError(f"DVC needs {missing['package']} for its remote", "pip install 'dspark[remote]'")
    if _UNSAVED in text:
        return PreflightError(
            f"outputs of build {build!r} were changed here, and pulling would overwrite them (see {log})",
            "move them away, or keep them: dspark run --build " + build,
        )
    if _INCOMPLETE.search(text):
        return _incomplete(build, f"files (see {log})")
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    said = [*errors, *lines, "it said nothing"][0]  # the first is the reason, the last a sum
    return ServiceError(
        f"DVC could not {direction}: {said}",
        f"see that the remote can be reached and written, then the same command goes on; log: {log}",
    )


def _nothing_recorded(build: str, direction: Direction) -> PreflightError:
    if direction == "push":
        return PreflightError(f"no stage of build {build!r} was made here", f"make it: dspark run --build {build}")
    return PreflightError(
        f"dvc.lock records no stage of build {build!r}, so there is nothing to ask the remote for",
        "commit it where the build was made: git add --force dvc.lock",
    )


def _incomplete(build: str, what: str) -> PreflightError:
    return PreflightError(
        f"the remote does not hold everything that dvc.lock names of build {build!r}: {what}",
        f"copy it there from where it was made: dspark remote push --build {build}",
    )
