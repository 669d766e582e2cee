"""Where the files of a released drafter lie on this machine, or are brought to: a folder, or a hub repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config.models import HubSource
from dspark.drafters.dialects import layout_of
from dspark.drafters.weights import CONFIG, drafter_files
from dspark.errors import DataError, PreflightError, ServiceError, SettingsError
from dspark.io.jsonfile import read_json
from dspark.io.progress import Progress
from dspark.targets import hub
from dspark.targets.layout import INDEX, SINGLE


@dataclass(frozen=True)
class Release:
    """A released drafter on this machine.

    Attributes:
        folder: with its `config.json`, and its weights if they were asked for.
        source: as others may know it: a folder's path means nothing to them.
    """

    folder: Path
    source: dict[str, Any]


def find_release(asked: str, revision: str, *, weights: bool, progress: Progress | None = None) -> Release:
    """The files of a released drafter.

    Args:
        asked: a folder, or `owner/name` on the hub.
        revision: of a repository.
        weights: bring the weights too; those of a target with its drafter inside are never brought.
    Raises:
        SettingsError: there is no such folder, and it is no repository's name.
        PreflightError: the repository is not on this machine and cannot be fetched.
        DataError: a repository without a drafter.
        ServiceError: the hub stopped answering.
    """
    folder = Path(asked).expanduser()
    if folder.is_dir():
        return Release(folder, {"kind": "folder"})
    if asked.startswith(("/", ".", "~")) or asked.count("/") != 1:
        raise SettingsError(f"{asked}: no such folder", "name the drafter's folder, or its repository: owner/name")
    try:
        return _from_hub(HubSource(kind="hub", repo=asked, revision=revision), weights, progress or Progress())
    except ImportError:
        raise PreflightError(
            "files from the hub are fetched with huggingface_hub", "pip install 'dspark[pipeline]', or name a folder"
        ) from None


def _from_hub(source: HubSource, weights: bool, progress: Progress) -> Release:
    cached = hub.cached_snapshot(source)
    if cached is not None and _complete(cached, weights):
        return Release(cached, _public(source, hub.commit_of(cached)))
    try:
        commit, names = hub.lookup(source)
    except ServiceError as reason:
        raise PreflightError(
            f"{source.repo} at {source.revision} is not on this machine and {reason.message}",
            "bring its folder here by other means and name that: dspark import FOLDER",
        ) from None
    if CONFIG not in names:
        raise DataError(f"{source.repo}: it has no {CONFIG}", "name the repository of a drafter in safetensors")
    folder = hub.fetch(source, commit, [name for name in (CONFIG, INDEX) if name in names], progress)
    if weights and _brings_weights(folder, source):
        wanted = drafter_files(folder) if INDEX in names else [SINGLE]
        if absent := [name for name in wanted if name not in names]:
            raise DataError(
                f"{source.repo}: it has no {', '.join(absent)}", "name the repository of a drafter in safetensors"
            )
        hub.fetch(source, commit, wanted, progress)
    return Release(folder, _public(source, commit))


def _complete(folder: Path, weights: bool) -> bool:
    """Whether a cached snapshot, which may hold a part of the repository, holds what is wanted."""
    if not (folder / CONFIG).is_file():
        return False
    try:
        return not (weights and not all((folder / name).is_file() for name in drafter_files(folder)))
    except DataError:
        return False


def _brings_weights(folder: Path, source: HubSource) -> bool:
    return layout_of(read_json(folder / CONFIG), f"{source.repo}/{CONFIG}") != "bundled"


def _public(source: HubSource, commit: str) -> dict[str, Any]:
    return {"kind": "hub", "repo": source.repo, "revision": commit}
