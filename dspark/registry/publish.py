"""Publish a package to MLflow: spool what there is to tell, deliver the spool; never the same twice."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dspark.errors import GateError, IntegrityError
from dspark.io.progress import Progress
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest, verify
from dspark.registry.delivery import Delivery, deliver
from dspark.registry.events import Ended, Event, PackageMade, StageEnded
from dspark.registry.lock import locked
from dspark.registry.reach import PATIENCE_SECONDS, shown
from dspark.registry.receipts import Receipt, default_uri, known_receipt
from dspark.registry.register import CANDIDATE, model_name, newest_version_of
from dspark.registry.spool import Spool
from dspark.registry.tracking import opened

__all__ = [
    "CANDIDATE",
    "delivered_receipt",
    "find_published",
    "model_name",
    "package_to_publish",
    "publish",
    "spool_of",
    "stage_ended",
]


def spool_of(workspace: Path) -> Spool:
    """The spool of a workspace."""
    return Spool(workspace / ".dspark" / "spool")


def publish(
    package: Path,
    *,
    workspace: Path,
    build: str,
    receipts: Path,
    stages: Sequence[Mapping[str, Any]] = (),
    tracking_uri: str | None = None,
    progress: Progress | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Receipt:
    """Register a package as the candidate of its build, once, in a run of its own.

    Publishing what the last receipt names loads no mlflow. Publishing a package that the registry has already (another
    receipt, none, or an interrupted attempt) completes what is missing and creates no version.

    Args:
        package: the package's folder; verified before anything is sent.
        workspace: holds the spool, and the registry (`mlflow/`) unless `tracking_uri` says otherwise.
        build: name of the build; the registered model is `dspark-<build>`.
        receipts: folder of the receipts.
        stages: results of the run's stages, `{stage, key, status, seconds}`.
        tracking_uri: an MLflow address; None: the workspace's own SQLite.
        progress: reported to between steps, each a safe point.
        patience_seconds: after that long without a step forward the server counts as away.
    Raises:
        IntegrityError: the package is not what its manifest says.
        GateError: the package belongs to another build.
        AwayError: the server is away; what there is to tell is kept for `dspark registry sync` or the next run.
        PreflightError: there is no room to register it.
        ServiceError: MLflow could not do what was asked.
        Interrupted: at a safe point.
    """
    progress = progress or Progress()
    uri = tracking_uri or default_uri(workspace)
    manifest = _manifest(package, build)
    spool = spool_of(workspace)
    digests = manifest.digests
    receipt = known_receipt(receipts, build, digests, shown(uri))
    if receipt is not None and not spool.awaits(build, digests):
        return receipt
    verify(package, digest=digests.self_digest)
    with locked(workspace / "mlflow" / ".publish", progress):
        receipt = known_receipt(receipts, build, digests, shown(uri))
        if not spool.awaits(build, digests):
            if receipt is not None:
                return receipt
            run = f"publish-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}"
            ended = Ended(time=time.time(), status="FINISHED", exit_code=0)
            events: list[Event] = [*map(stage_ended, stages), ended, package_to_publish(package, manifest, workspace)]
            spool.begin(run, build, "publish", events)
        delivery = deliver(
            spool,
            workspace=workspace,
            tracking_uri=uri,
            receipts=receipts,
            verified=(manifest.digests.self_digest,),
            progress=progress,
            patience_seconds=patience_seconds,
        )
    return delivered_receipt(delivery, receipts, manifest, uri)


def delivered_receipt(delivery: Delivery, receipts: Path, manifest: Manifest, uri: str) -> Receipt:
    """The receipt of a package after a delivery.

    Raises:
        IntegrityError: it was not registered, with the reason.
    """
    receipt = known_receipt(receipts, manifest.build, manifest.digests, shown(uri))
    if receipt is None:
        why = "; ".join(problem.message for problem in delivery.problems) or "another package was published meanwhile"
        raise IntegrityError(f"package {manifest.digests.package_digest} was not registered: {why}", "dspark doctor")
    return receipt


def stage_ended(result: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> StageEnded:
    """The event of a stage's result `{stage, key, status, seconds, category, message}`, all but `stage` optional."""
    seconds = result.get("seconds")
    numbers = dict(metrics or {}) | ({"seconds": float(seconds)} if isinstance(seconds, int | float) else {})
    texts = {name: str(result.get(name) or "") for name in ("key", "category", "message")}
    return StageEnded(
        time=time.time(), stage=str(result["stage"]), status=str(result.get("status")), metrics=numbers, **texts
    )


def package_to_publish(package: Path, manifest: Manifest, workspace: Path) -> PackageMade:
    """The event of a package that is to be registered."""
    place, root = package.resolve(), workspace.resolve()
    return PackageMade(
        time=time.time(),
        build=manifest.build,
        folder=place.relative_to(root).as_posix() if place.is_relative_to(root) else str(place),
        package_digest=manifest.digests.package_digest,
        evidence_digest=manifest.digests.evidence_digest,
    )


def find_published(
    build: str,
    package_digest: str,
    *,
    workspace: Path,
    tracking_uri: str | None = None,
    progress: Progress | None = None,
) -> Receipt | None:
    """What the registry itself knows of a package, whatever the local receipts say; None if it is not there.

    Raises:
        ServiceError: MLflow could not be asked.
    """
    uri = tracking_uri or default_uri(workspace)
    with locked(workspace / "mlflow" / ".lock", progress or Progress()), opened(uri, retries=2) as registry:
        return newest_version_of(registry, build, package_digest)


def _manifest(package: Path, build: str) -> Manifest:
    manifest = read_manifest(package)
    if manifest.build != build:
        raise GateError(
            f"{package}: is a package of build {manifest.build!r}, not of {build!r}",
            f"dspark run --build {manifest.build}",
        )
    return manifest
