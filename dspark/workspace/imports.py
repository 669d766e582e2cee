"""Imported drafters in the store: kept under the digest of their files, found by the builds that name them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.config.models import Build
from dspark.drafters.dialects import layout_of
from dspark.drafters.fitting import read_released_config, require_declared
from dspark.drafters.origin import LISTING, DrafterOrigin, StoredFile, read_origin
from dspark.drafters.weights import CONFIG
from dspark.errors import DataError, IntegrityError, PreflightError
from dspark.io.atomic import replace_tree
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_json, write_model
from dspark.targets.record import read_record
from dspark.workspace.layout import Workspace

AGAIN = "dspark import SOURCE --target NAME"


def keep_drafter(workspace: Workspace, folder: Path, names: Sequence[str], source: Mapping[str, Any]) -> DrafterOrigin:
    """Keep a copy of a drafter's files, byte for byte.

    Args:
        folder: that holds them; links are followed.
        names: of its `config.json` and its weights.
        source: where it came from, as others may know it.
    Raises:
        PreflightError: there is no room on the disk.
        DataError: a file is missing.
    """
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise DataError(f"{folder}: missing {', '.join(absent)}", "fetch the drafter again")
    store = workspace.drafters
    store.mkdir(parents=True, exist_ok=True)
    size, free = sum((folder / name).stat().st_size for name in names), shutil.disk_usage(store).free
    if free < size:
        raise PreflightError(
            f"{store}: {free / 1e9:.1f} GB free, the drafter takes {size / 1e9:.1f} GB", "free some space"
        )
    with tempfile.TemporaryDirectory(dir=store, prefix=".import-") as scratch:
        copy = Path(scratch) / "drafter"
        copy.mkdir()
        for name in names:
            shutil.copyfile(folder / name, copy / name)
        layout = layout_of(read_json(copy / CONFIG), str(folder / CONFIG))
        files = {
            name: StoredFile(sha256=digest_file(copy / name), bytes=(copy / name).stat().st_size) for name in names
        }
        origin = DrafterOrigin.model_validate({"layout": layout, "source": dict(source), "files": files})
        write_model(copy / LISTING, origin)
        replace_tree(copy, workspace.imported(origin.digest))
    return origin


def kept_drafter(workspace: Workspace, digest: str) -> DrafterOrigin:
    """The listing of an imported drafter whose files are there; they are read in full only by the stage.

    Raises:
        PreflightError: it is not in the store.
        IntegrityError: it is not whole, or not the drafter of that digest.
    """
    folder = workspace.imported(digest)
    if not folder.is_dir():
        raise missing_drafter(workspace, digest)
    origin = read_origin(folder)
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else None for name in origin.files}
    damaged = [name for name, file in origin.files.items() if sizes[name] != file.bytes]
    if damaged or origin.digest != digest:
        what = f"{', '.join(damaged)} missing or cut off" if damaged else f"{LISTING} lists another drafter"
        raise IntegrityError(f"{folder}: {what}", f"remove {folder} and import the drafter again")
    return origin


def missing_drafter(workspace: Workspace, digest: str) -> PreflightError:
    """What to say of a drafter that is not in the store."""
    return PreflightError(f"imported drafter {digest} is not in {workspace.imported('')}", AGAIN)


def imported_files(workspace: Workspace, build: Build) -> dict[str, str]:
    """The files of the drafter that a build imports and their sha256; {} if it trains its own.

    Raises:
        PreflightError: it is not in the store.
        IntegrityError: it is not whole.
        DataError: it is another target's.
        SettingsError: the build's `drafter` section describes another one; says what differs.
    """
    digest = build.training.imported
    if digest is None:
        return {}
    origin = kept_drafter(workspace, digest)
    record = workspace.target_record(build.target.name)
    if record.is_file():
        config = read_released_config(workspace.imported(digest), read_record(record), IntegrityError)
        require_declared(config, build.drafter, build.name)
    return {name: file.sha256 for name, file in sorted(origin.files.items())}
