"""Targets on the Hugging Face hub: what its local cache holds, whether the hub answers, and fetching from it."""

from __future__ import annotations

import fnmatch
import os
import threading
from pathlib import Path
from typing import Any

from dspark.config.models import HubSource
from dspark.errors import PreflightError, ServiceError
from dspark.io.progress import Progress
from dspark.targets.layout import PATTERNS, missing

_PATIENCE_SECONDS = 4.0  # after which a hub that does not answer counts as out of reach


def cached_snapshot(source: HubSource, revision: str | None = None) -> Path | None:
    """The folder of a revision in the hub's local cache, complete or not; asks nobody, touches nothing.

    Args:
        revision: instead of the source's.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source.repo, revision=revision or source.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError):
        return None


def commit_of(snapshot: Path) -> str:
    """The commit of a cached snapshot: the cache names the folder after it."""
    return snapshot.name


def lookup(source: HubSource, revision: str | None = None) -> tuple[str, list[str]]:
    """Ask the hub what a revision is, in bounded time.

    Returns:
        the commit, and the names of its files that a target needs.
    Raises:
        PreflightError: no such repository or revision, or access is refused.
        ServiceError: the hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ServiceError("HF_HUB_OFFLINE is set")
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(HfApi().model_info(source.repo, revision=revision or source.revision, timeout=3.0))
        except Exception as reason:
            answer.append(reason)

    # A thread of its own: name resolution obeys no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    found = answer[0] if answer else TimeoutError(f"no answer within {_PATIENCE_SECONDS:g} s")
    if isinstance(found, GatedRepoError):
        raise PreflightError(f"{source.repo}: the hub wants its terms accepted first", "then `hf auth login`")
    if isinstance(found, RepositoryNotFoundError | RevisionNotFoundError | HFValidationError):
        raise PreflightError(f"{source.repo} at {revision or source.revision}: not on the hub")
    if isinstance(found, Exception):
        raise ServiceError(f"the hub does not answer: {type(found).__name__}: {str(found).splitlines()[0]}")
    names = [sibling.rfilename for sibling in found.siblings or []]
    return str(found.sha), sorted(name for name in names if any(fnmatch.fnmatch(name, p) for p in PATTERNS))


def absent_files(source: HubSource, revision: str | None = None) -> list[str]:
    """Files of a target that the local cache lacks, as far as that can be known without the hub."""
    snapshot = cached_snapshot(source, revision)
    if snapshot is not None:
        return missing(snapshot)
    return ["config.json", "tokenizer.json", "model.safetensors (or model.safetensors.index.json and its shards)"]


def fetch(source: HubSource, commit: str, names: list[str], progress: Progress) -> Path:
    """Bring the named files of a commit into the hub's cache; half-fetched files are continued.

    Raises:
        ServiceError: the hub stopped answering.
        Interrupted: between two files.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    progress.start(f"fetch {source.repo}", len(names), unit="files")
    for name in names:
        try:
            path = Path(hf_hub_download(source.repo, name, revision=commit))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as reason:
            raise ServiceError(
                f"{source.repo}: cannot fetch {name}: {str(reason).splitlines()[0]}", "run again to continue"
            ) from None
        progress.advance()
    return path.parent
