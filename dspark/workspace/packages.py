"""Packages kept in the store by their package_digest: where retraining starts, what candidates are compared with."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path

from dspark.config.models import Build
from dspark.drafters.config import DrafterConfig
from dspark.drafters.description import trained_config
from dspark.errors import IntegrityError, PreflightError, SettingsError
from dspark.io.atomic import replace_tree
from dspark.io.jsonfile import read_json
from dspark.package.layout import DRAFTER_CONFIG, DRAFTER_WEIGHTS
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest, verify
from dspark.targets.record import TargetRecord, read_record
from dspark.workspace.layout import Workspace


def keep_package(workspace: Workspace, source: Path) -> Manifest:
    """Verify a package and keep a copy of it, unless a sound one is there.

    Raises:
        IntegrityError: it is not what its manifest says.
    """
    manifest = read_manifest(source)
    digest = manifest.digests.package_digest
    folder = workspace.package(digest)
    if folder.is_dir() and is_sound(folder, digest):
        return read_manifest(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{digest[:12]}-") as name:
        copy = Path(name) / "package"
        shutil.copytree(source, copy, symlinks=True)
        verify(copy, digest=digest)  # of the copy: what was verified is what is kept
        replace_tree(copy, folder)
    return manifest


def kept_package(workspace: Workspace, digest: str) -> Manifest:
    """The manifest of a package of the store, which is verified.

    Raises:
        PreflightError: it is not there.
        IntegrityError: it is damaged.
    """
    folder = workspace.package(digest)
    if not folder.is_dir():
        raise missing_package(workspace, digest)
    try:
        verify(folder, digest=digest)
    except IntegrityError as error:
        again = f"remove {folder} and fetch it again:\n{how_to_fetch(folder, digest)}"
        raise IntegrityError(error.message, again) from None
    return read_manifest(folder)


def missing_package(workspace: Workspace, digest: str) -> PreflightError:
    """What to say of a package that is not in the store."""
    folder = workspace.package(digest)
    return PreflightError(f"package {digest} is not in {folder.parent}", how_to_fetch(folder, digest))


def how_to_fetch(folder: Path, digest: str) -> str:
    """What brings this very package: an alias may have moved on to another one, and only a person knows its version."""
    where = shlex.quote(str(folder))
    return (
        f"dspark package pull models:/NAME/VERSION {where} --digest {digest}\n"
        "which VERSION that is: dspark registry show NAME"
    )


def is_sound(folder: Path, digest: str) -> bool:
    """Whether the package `digest` lies in a folder, every byte as its manifest says."""
    try:
        verify(folder, digest=digest)
    except IntegrityError:
        return False
    return True


def initial_files(workspace: Workspace, build: Build) -> dict[str, str]:
    """The files that training starts from and their sha256, from a package that was verified; {} if there are none.

    Raises:
        PreflightError: the package that the build names is not in the store.
        IntegrityError: it is damaged.
        SettingsError: it is of another target or architecture; says what differs.
    """
    initial = build.training.initial
    if initial is None:
        return {}
    manifest = kept_package(workspace, initial.package)
    record = workspace.target_record(build.target.name)
    if record.is_file():
        require_fitting(workspace.package(initial.package), manifest, build, read_record(record))
    listed = {entry.path: entry.sha256 for entry in manifest.files}
    return {path: listed[path] for path in (DRAFTER_CONFIG, DRAFTER_WEIGHTS)}


def require_fitting(folder: Path, manifest: Manifest, build: Build, record: TargetRecord) -> None:
    """Refuse a package whose drafter a build cannot go on from.

    Raises:
        SettingsError: another target, taps, block size or geometry, or heads that the build does not have; names every
            difference.
    """
    target = manifest.inputs.target
    keys = ("weights_digest", "embedding_digest", "head_digest")
    different = [key for key in keys if getattr(target, key) != getattr(record, key)]
    if different:
        raise SettingsError(
            f"{folder}: its drafter belongs to {target.public_id} {target.revision}, build {build.name!r} is for "
            f"{record.public_id or record.name} {record.revision} ({', '.join(different)} differ)",
            f"train a first drafter for this target: dspark run --build {build.name}",
        )
    path = folder / DRAFTER_CONFIG
    config = trained_config(read_json(path, IntegrityError), str(path))
    DrafterConfig.of(record, build.drafter).require_startable(config, str(folder))
