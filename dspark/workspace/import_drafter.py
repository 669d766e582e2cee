"""`dspark import`: a released drafter into the store and, if a name is given, into a build of its own.

The build names the drafter by its digest and trains nothing; calibration, profiling, evaluation, export, certification
and the package are those of any build. No file that is there is changed: like `dspark targets add`, this verb writes a
new one, and only if it is told what to call it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config.build import FOLDERS, PARTS, RECIPE_SECTIONS, SECTIONS
from dspark.config.declared import NAME, read_mapping
from dspark.config.layers import Origin, Overlay
from dspark.config.models import DrafterSettings
from dspark.config.resolve import resolve
from dspark.drafters.fitting import read_released_config, settings_of
from dspark.drafters.origin import DrafterOrigin
from dspark.drafters.weights import CONFIG, drafter_files
from dspark.errors import SettingsError
from dspark.io.atomic import write_text
from dspark.io.jsonfile import model_json
from dspark.io.progress import install_stop_signals
from dspark.io.yamlfile import yaml_text
from dspark.targets.catalogue import read_target
from dspark.targets.layout import INDEX
from dspark.targets.materialise import materialise
from dspark.targets.record import TargetRecord
from dspark.workspace.imports import keep_drafter
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock
from dspark.workspace.release import find_release

STAGE = "import"
MARK = "# Declared by `dspark import`."
# What the measurement on the dev split goes by; the rest of `training` says how to train, and nothing is trained.
MEASURED_BY = ("max_length", "precision")
# Of a build that another one is made like: what it is measured on and with, not what makes its drafter.
SHARED = tuple(key for key in (*PARTS, *SECTIONS) if key not in ("name", "description", "target", "recipe", "against"))


@dataclass(frozen=True)
class ImportRequest:
    """What was asked for.

    Attributes:
        source: a folder, or a repository on the hub.
        target: of the workspace, that the drafter was trained for.
        revision: of the repository.
        build: to write; None: none.
        like: the build whose corpus, profiles and settings it shares; None: the target's own.
    """

    source: str
    target: str
    revision: str = "main"
    build: str | None = None
    like: str | None = None


@dataclass(frozen=True)
class Imported:
    """What came of it."""

    origin: DrafterOrigin
    drafter: DrafterSettings
    parameters: int
    folder: Path
    build: Path | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": "dspark/import/1",
            "imported": self.origin.digest,
            "origin": model_json(self.origin),
            "drafter": self.drafter.model_dump(mode="json"),
            "parameters": self.parameters,
            "folder": str(self.folder),
            "build": None if self.build is None else str(self.build),
            "notes": list(self.notes),
        }


def import_drafter(workspace: Workspace, request: ImportRequest, listener: Listener) -> Imported:
    """Verify a released drafter against its target, keep it, and declare a build of it if one is asked for.

    Raises:
        SettingsError: no such folder or target, or a name that is taken or cannot be one.
        PreflightError: the drafter or the target is not at hand and cannot be fetched, or the disk is full.
        DataError: no drafter that can be imported, or another target's; says why.
        IntegrityError: one of our own that is damaged.
    """
    spec = read_target(workspace.root / FOLDERS["target"], request.target, root=workspace.root)
    if request.build is not None:
        _require_free(workspace, request.build)
    install_stop_signals()
    started = time.monotonic()
    progress = ListenedProgress(listener, f"{STAGE}@{request.target}")
    release = find_release(request.source, request.revision, weights=True, progress=progress)
    path = release.folder / CONFIG
    with run_lock(workspace, f"dspark import {request.source}", listener.note):
        record = materialise(spec, root=workspace.root, progress=progress)
        settings = settings_of(read_released_config(release.folder, record), str(path))
        names = drafter_files(release.folder)
        parameters, notes = _verified(workspace, release.folder, record)
        index = [INDEX] if (release.folder / INDEX).is_file() else []
        origin = keep_drafter(workspace, release.folder, [CONFIG, *index, *names], release.source)
        build = None if request.build is None else _declare(workspace, request, request.build, origin, settings)
    progress.end(time.monotonic() - started)
    return Imported(origin, settings, parameters, workspace.imported(origin.digest), build, notes)


def _verified(workspace: Workspace, folder: Path, record: TargetRecord) -> tuple[int, tuple[str, ...]]:
    """Read the whole drafter as the stage will; its parameters, and what is worth knowing about it."""
    from dspark.drafters.checkpoint import parameters
    from dspark.drafters.released import foreign_ends, read_released
    from dspark.targets.ends import read_ends

    ends = read_ends(record, workspace.root)
    drafter = read_released(folder, record, ends.embedding, ends.head)
    count = sum(value.numel() for value in parameters(drafter).values())
    notes = []
    if others := foreign_ends(folder, ends.embedding, ends.head):
        notes.append(
            f"it stores {' and '.join(others)} of other values than target {record.name} has: it was trained on "
            "another model, or another revision; `evaluate` says what that costs"
        )
    return count, tuple(notes)


def _require_free(workspace: Workspace, name: str) -> None:
    """Refuse a name that cannot be one, or is taken, before anything is fetched.

    Raises:
        SettingsError: one or the other.
    """
    if not NAME.match(name):
        raise SettingsError(f"--build {name}: cannot be a name", "use lower-case letters, digits, dots and hyphens")
    path = workspace.root / FOLDERS["build"] / f"{name}.yaml"
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(MARK):
        raise _taken(name)


def _taken(name: str) -> SettingsError:
    """What to say of a build's file that is there and says something else."""
    return SettingsError(
        f"{FOLDERS['build']}/{name}.yaml: build {name!r} exists", "choose another name or edit the file"
    )


def _declare(
    workspace: Workspace, request: ImportRequest, name: str, origin: DrafterOrigin, settings: DrafterSettings
) -> Path:
    """Write the build's file, which was found to resolve.

    Raises:
        SettingsError: the name is taken, or the build would have mistakes.
    """
    path = workspace.root / FOLDERS["build"] / f"{name}.yaml"
    like = request.like or request.target
    file = f"{FOLDERS['build']}/{like}.yaml"
    shared = read_mapping(workspace.root / file, file) if (workspace.root / file).is_file() else {}
    training = {key: value for key, value in (shared.get("training") or {}).items() if key in MEASURED_BY}
    made: dict[str, Any] = {
        "drafter": settings.model_dump(mode="json"),
        "training": {"imported": origin.digest, **training},
    }
    if not settings.confidence:
        made["training"]["loss"] = {"confidence": 0.0}  # the weight of a head that it does not have
    weight = {"loss": {"confidence": float(settings.confidence)}}
    layer = {**made, "training": {**made["training"], **weight, "initial": None, "mixture": None}}
    found = resolve(workspace.root, build=like, overlay=Overlay(layer, Origin("verb", "dspark import"))).chosen.build
    if found.target.name != request.target:
        raise SettingsError(
            f"build {like!r} is for target {found.target.name!r}, not {request.target!r}",
            "name a build of the same target: --like BUILD",
        )
    declared = {
        "name": name,
        "description": f"A released drafter ({origin}), not trained here",
        "target": request.target,
        "corpus": shared.get("corpus", like),
        **{key: shared[key] for key in SHARED if key in shared and key not in ("corpus", *RECIPE_SECTIONS)},
        **made,
    }
    text = f"{MARK} What it shares with build {like} is measured on the same corpus.\n{yaml_text(declared)}"
    if path.is_file():
        if path.read_text(encoding="utf-8") == text:
            return path
        raise _taken(name)
    write_text(path, text)
    try:
        resolve(workspace.root, build=name)
    except SettingsError:
        path.unlink()
        raise
    return path
