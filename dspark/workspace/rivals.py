"""Packages in the store that a candidate is measured against: there, sound, and of the same target, or refused."""

from __future__ import annotations

from pathlib import Path

from dspark.errors import DsparkError, IntegrityError, PreflightError
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest, verify
from dspark.targets.record import TargetRecord
from dspark.workspace.layout import Workspace

# What a drafter must share with the target of this workspace to draft for it on the same prompts.
_SAME = ("weights_digest", "embedding_digest", "head_digest", "tokenizer_digest")


def open_rival(workspace: Workspace, digest: str, record: TargetRecord | None) -> tuple[Path, Manifest]:
    """A package of the store, verified to the byte, whose drafter fits a target.

    Args:
        digest: its package_digest.
        record: the target that the candidate drafts for; None: it is not fetched yet, and not compared.
    Returns:
        its folder and its manifest.
    Raises:
        PreflightError: it is not in the store, or belongs to another target.
        IntegrityError: it is not what its manifest or the digest says.
    """
    folder = workspace.package(digest)
    _require(folder, digest)
    manifest = read_manifest(folder)
    verify(folder, digest=manifest.digests.self_digest)
    if manifest.digests.package_digest != digest:
        raise IntegrityError(
            f"{folder}: holds package {manifest.digests.package_digest}, not the one that it is named after",
            f"rm -r {folder}, then {_pull(folder)}",
        )
    if record is not None:
        _require_same_target(manifest, record)
    return folder, manifest


def rival_mistake(workspace: Workspace, digest: str, record: TargetRecord | None) -> DsparkError | None:
    """Why a package cannot be measured against, or None if it can; as `open_rival`."""
    try:
        open_rival(workspace, digest, record)
    except DsparkError as error:
        return error
    return None


def _require(folder: Path, digest: str) -> None:
    if not folder.is_dir():
        raise PreflightError(
            f"package {digest} is to be measured against and is not in the store ({folder} does not exist)",
            _pull(folder),
        )


def _require_same_target(manifest: Manifest, record: TargetRecord) -> None:
    theirs, drafter = manifest.inputs.target, manifest.drafter
    different = [name for name in _SAME if getattr(theirs, name) != getattr(record, name)]
    # The target's pass yields the features of its own taps, and its own mask token fills a block.
    different += [name for name in ("taps", "mask_token_id") if getattr(drafter, name) != getattr(record, name)]
    if different:
        raise PreflightError(
            f"package {manifest.digests.package_digest} belongs to target {theirs.name} ({theirs.public_id}), "
            f"not to this {record.name}: {', '.join(different)} differ",
            "name a package of the same target as `against` (and in pipeline/gates.yaml), or null",
        )


def _pull(folder: Path) -> str:
    return f"dspark package pull models:/NAME@production {folder}"
