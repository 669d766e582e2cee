"""Packages in the store that a candidate is measured against: there, sound, and of the same target, or refused."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config.models import ServingProfile
from dspark.errors import DsparkError, IntegrityError, PreflightError, SettingsError
from dspark.package.layout import SCHEDULER
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest, verify
from dspark.scheduling.config import read_scheduler
from dspark.targets.record import TargetRecord
from dspark.workspace.layout import Workspace
from dspark.workspace.packages import how_to_fetch

if TYPE_CHECKING:
    from dspark.drafters.base import Drafter
    from dspark.evaluation.rivals import Champion, RivalDrafter
    from dspark.targets.loading import Target

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
            f"rm -r {shlex.quote(str(folder))}, then\n{how_to_fetch(folder, digest)}",
        )
    if record is not None:
        _require_same_target(manifest, record)
    return folder, manifest


def rival_drafter(workspace: Workspace, digest: str, record: TargetRecord) -> RivalDrafter:
    """The drafter of a package, for the evaluation; as `open_rival`."""
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.evaluation.rivals import RivalDrafter

    folder, manifest = open_rival(workspace, digest, record)

    def load(target: Target) -> Drafter:
        drafter = read_checkpoint(folder / "drafter", target.embedding, target.head, record=record)
        return drafter.to(target.dtype)

    return RivalDrafter(
        package_digest=digest,
        model_digest=manifest.digests.model_digest,
        build=manifest.build,
        gamma=manifest.drafter.gamma,
        training_domains=manifest.inputs.corpus.domains,
        load=load,
    )


def champion(
    workspace: Workspace, digest: str, record: TargetRecord, profile: ServingProfile, *, device: str = "cpu"
) -> Champion:
    """The drafter of a package as its users run it on a profile, for the certificate; as `open_rival`.

    Args:
        device: that the profile is measured on; what drafts in torch drafts where the target is.
    Raises:
        PreflightError: the profile drafts with ONNX Runtime, and the package has no graph for it.
    """
    from dspark.decoding.drafting import Proposer
    from dspark.decoding.proposers import torch_proposer
    from dspark.engines.onnxruntime import OnnxProposer, providers_on
    from dspark.evaluation.rivals import Champion

    drafter = rival_drafter(workspace, digest, record)
    folder = workspace.package(digest)
    graphs = folder / "engines" / "onnxruntime"
    if profile.draft_backend == "onnxruntime" and not graphs.is_dir():
        raise PreflightError(
            f"package {digest} has no files for ONNX Runtime, in which profile {profile.name} drafts",
            "set draft_backend to torch in the profile, or `against` to null",
        )

    def load(target: Target) -> Proposer:
        if profile.draft_backend == "onnxruntime":
            return OnnxProposer(graphs, providers=providers_on(device))
        return torch_proposer(drafter.load(target))

    scheduler = None
    with suppress(SettingsError):  # no curve of this profile: its users cannot schedule there either
        scheduler = read_scheduler(folder / SCHEDULER).scheduler(profile.name, 0.0)
    return Champion(digest, load, scheduler)


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
            how_to_fetch(folder, digest),
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
