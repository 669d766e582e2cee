"""Where the files of a package's target lie on this machine, or are brought to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dspark.config.models import HubSource
from dspark.errors import DsparkError, PreflightError, ServiceError, SettingsError
from dspark.io.jsonfile import read_json
from dspark.io.progress import Progress
from dspark.package.manifest import TargetInput
from dspark.targets import hub
from dspark.targets.layout import INDEX, SINGLE
from dspark.targets.record import read_record
from dspark.targets.traits import EMBEDDINGS, HEAD
from dspark.workspace.layout import Workspace


def target_folder(
    asked: str | None, target: TargetInput, workspace: Callable[[], Workspace], progress: Progress | None = None
) -> Path:
    """A model folder that holds at least the embedding and the head of a package's target.

    Args:
        asked: a folder, a target of the workspace, or a repository on the hub; None: what the package names.
        workspace: finds it; only called for a name.
        progress: of files from the hub.
    Raises:
        SettingsError: there is no such folder, target or repository.
        PreflightError: it is not at hand and cannot be fetched.
        ServiceError: the hub does not answer.
    """
    if asked is None:
        repo = target.source.get("repo") if target.source.get("kind") == "hub" else None
        if not isinstance(repo, str):
            raise SettingsError(
                f"target {target.public_id} was no repository on the hub, so its files must be named",
                "--target: a folder with its config.json and safetensors files, or its name in this workspace",
            )
        return _from_hub(repo, target, progress or Progress())
    if Path(asked).is_dir():
        return Path(asked)
    if "/" not in asked:
        return _from_workspace(asked, workspace)
    if asked.startswith(("/", ".", "~")) or asked.count("/") != 1:
        raise SettingsError(f"{asked}: no such folder", "name the target's folder, or its repository: owner/name")
    return _from_hub(asked, target, progress or Progress())


def _from_workspace(name: str, workspace: Callable[[], Workspace]) -> Path:
    try:
        found = workspace()
        record = read_record(found.target_record(name))
    except DsparkError as reason:
        raise SettingsError(f"{name!r} is no folder, and no target that was fetched here: {reason.message}") from None
    folder = record.folder(found.root)
    if not folder.is_dir():
        raise PreflightError(f"target {name!r} is not in {folder}", f"dspark targets fetch {name}")
    return folder


def _from_hub(repo: str, target: TargetInput, progress: Progress) -> Path:
    """The repository at the revision that the package was made with; only the files with both matrices are fetched."""
    try:
        source = HubSource(kind="hub", repo=repo, revision=target.revision)
        cached = hub.cached_snapshot(source)
        if cached is not None and all((cached / name).is_file() for name in _needed(cached)):
            return cached
        commit, names = hub.lookup(source)
    except ImportError:
        raise PreflightError(
            "files from the hub are fetched with huggingface_hub", "pip install 'dspark[pipeline]', or --target FOLDER"
        ) from None
    except ServiceError as reason:
        raise PreflightError(
            f"{repo} at {target.revision} is not on this machine and {reason.message}",
            "name a folder with its files: --target FOLDER",
        ) from None
    first = INDEX if INDEX in names else SINGLE
    folder = hub.fetch(source, commit, [first], progress)
    return hub.fetch(source, commit, _needed(folder), progress)


def _needed(folder: Path) -> list[str]:
    """Names of the files that hold the two matrices; of the one file where there is no index."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    places = read_json(folder / INDEX, PreflightError)["weight_map"]
    return sorted({places[name] for name in (*EMBEDDINGS, HEAD) if name in places})
