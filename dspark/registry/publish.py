"""Publish a package to MLflow: one run, one model version, alias `candidate`; the same package never twice.

The order makes every interruption harmless: the run is complete before the version exists, the version carries the
package's digest from its first moment, the alias and the local receipt come last. Whatever is done again finds by
that digest what is there already.
"""

from __future__ import annotations

import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dspark import __version__
from dspark.errors import GateError
from dspark.io.digest import digest_bytes
from dspark.io.progress import Progress
from dspark.package.manifest import Manifest
from dspark.package.verify import read_manifest, verify
from dspark.registry import records
from dspark.registry.lock import locked
from dspark.registry.receipts import Receipt, default_uri, known_receipt, write_receipt
from dspark.registry.tracking import Registry, opened

CANDIDATE = "candidate"
_MODEL_CODE = Path(__file__).with_name("pyfunc_model.py")
_DIGEST_TAG = "dspark.package_digest"
_BUILD_TAG = "dspark.build"
_PUBLISHER_TAG = "dspark.publisher"
_STEPS = 6


def publish(
    package: Path,
    *,
    workspace: Path,
    build: str,
    receipts: Path,
    stages: Sequence[Mapping[str, Any]] = (),
    tracking_uri: str | None = None,
    progress: Progress | None = None,
) -> Receipt:
    """Register a package as the candidate of its build, once.

    Publishing what the last receipt names loads no mlflow. Publishing a package that the registry has already (another
    receipt, none, or an interrupted attempt) completes what is missing and creates no version.

    Args:
        package: the package's folder; verified before anything is sent.
        workspace: holds the registry (`mlflow/`) unless `tracking_uri` says otherwise.
        build: name of the build; the registered model is `dspark-<build>`.
        receipts: folder of the receipts.
        stages: results of the run's stages, `{stage, status, seconds, ...}`.
        tracking_uri: an MLflow address; None: the workspace's own SQLite.
        progress: reported to between steps, each a safe point.
    Raises:
        IntegrityError: the package is not what its manifest says.
        GateError: the package belongs to another build.
        ServiceError: MLflow could not do what was asked.
        Interrupted: at a safe point; the run is marked as killed.
    """
    progress = progress or Progress()
    uri = tracking_uri or default_uri(workspace)
    manifest = read_manifest(package)
    if manifest.build != build:
        raise GateError(
            f"{package}: is a package of build {manifest.build!r}, not of {build!r}",
            f"dspark run --build {manifest.build}",
        )
    receipt = known_receipt(receipts, build, manifest.digests.package_digest, uri)
    if receipt is not None:
        return receipt
    verify(package, digest=manifest.digests.self_digest)
    progress.start("publish", _STEPS)
    with locked(workspace / "mlflow" / ".lock", progress), opened(uri) as registry:
        publisher = digest_bytes(f"{platform.node()}:{workspace.resolve()}".encode())[:16]
        _end_stale_runs(registry, publisher)
        progress.advance()
        receipt = _registered(registry, manifest)
        if receipt is None:
            _discard_leftovers(registry, manifest)
            receipt = _register(registry, package, manifest, stages, publisher, progress)
        else:
            _complete_run(registry, receipt.run_id)
            _set_candidate(registry, receipt)
        write_receipt(receipts, receipt)
        progress.advance()
    return receipt


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
    with locked(workspace / "mlflow" / ".lock", progress or Progress()), opened(uri) as registry:
        return _version_of(registry, build, package_digest)


def model_name(build: str) -> str:
    """The registered model of a build."""
    return f"dspark-{build}"


def _register(
    registry: Registry,
    package: Path,
    manifest: Manifest,
    stages: Sequence[Mapping[str, Any]],
    publisher: str,
    progress: Progress,
) -> Receipt:
    tags = records.tags(package, manifest, stages)
    with _run(registry, manifest, tags | {_PUBLISHER_TAG: publisher}) as run_id:
        progress.advance()
        _log_records(registry, run_id, package, manifest, stages)
        progress.advance()
        model_uri = _log_model(registry, package, manifest)
        progress.advance()
        name = model_name(manifest.build)
        if not registry.client.search_registered_models(filter_string=f"name = '{name}'"):
            registry.client.create_registered_model(name)
        # The tags are written in the same transaction as the version; a server demands that the model is named twice.
        created = registry.client.create_model_version(
            name, model_uri, run_id, tags=tags, model_id=model_uri.removeprefix("models:/")
        )
        receipt = _receipt(registry, manifest.build, created)
        progress.advance()
        _set_candidate(registry, receipt)
    return receipt


@contextmanager
def _run(registry: Registry, manifest: Manifest, tags: Mapping[str, str]) -> Iterator[str]:
    """A run whose final status is true: FINISHED only if the body ended well, KILLED if it was stopped."""
    name = f"{manifest.build}-{manifest.digests.package_digest[:12]}"
    created = registry.client.create_run(registry.experiment_id, tags=dict(tags), run_name=name)
    run_id: str = created.info.run_id
    try:
        with registry.mlflow.start_run(run_id=run_id, nested=True):
            yield run_id
    except BaseException as stop:
        # mlflow calls every end by exception a failure, and one by a signal none at all.
        registry.client.set_terminated(run_id, "FAILED" if isinstance(stop, Exception) else "KILLED")
        raise


def _log_records(
    registry: Registry, run_id: str, package: Path, manifest: Manifest, stages: Sequence[Mapping[str, Any]]
) -> None:
    from mlflow.entities import Metric, Param

    now = time.time_ns() // 1_000_000
    params = [Param(key, value) for key, value in records.parameters(manifest).items()]
    metrics = [Metric(key, value, now, 0) for key, value in records.metrics(package, stages).items()]
    metrics += [Metric(key, value, now, step) for key, value, step in records.curves(package)]
    for start in range(0, len(params), 100):  # MLflow's limits per call
        registry.client.log_batch(run_id, params=params[start : start + 100])
    for start in range(0, len(metrics), 1000):
        registry.client.log_batch(run_id, metrics=metrics[start : start + 1000])


def _log_model(registry: Registry, package: Path, manifest: Manifest) -> str:
    """Log the package as a model from code and return its address: the code file and the package, nothing pickled."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, ParamSpec, Schema, TensorSpec

    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("float32"), (-1, manifest.drafter.gamma))]),
        outputs=Schema([TensorSpec(np.dtype("int64"), (-1,))]),
        params=ParamSchema([ParamSpec("profile", "string", ""), ParamSpec("temperature", "double", 0.0)]),
    )
    info = registry.mlflow.pyfunc.log_model(
        name="package",
        python_model=str(_MODEL_CODE),
        artifacts={"package": str(package.resolve())},
        signature=signature,
        # Named, so that mlflow does not start processes to find out; the light base of dspark is enough.
        pip_requirements=[f"dspark=={__version__}", *(f"{name}=={version(name)}" for name in ("mlflow", "numpy"))],
        tags={_DIGEST_TAG: manifest.digests.package_digest, _BUILD_TAG: manifest.build},
    )
    return str(info.model_uri)


def _registered(registry: Registry, manifest: Manifest) -> Receipt | None:
    return _version_of(registry, manifest.build, manifest.digests.package_digest)


def _version_of(registry: Registry, build: str, package_digest: str) -> Receipt | None:
    """The first version of a build's model that carries the package's digest."""
    wanted = f"name = '{model_name(build)}' and tags.`{_DIGEST_TAG}` = '{package_digest}'"
    found = registry.client.search_model_versions(wanted)
    first = min(found, key=lambda item: int(item.version), default=None)
    return None if first is None else _receipt(registry, build, first)


def _receipt(registry: Registry, build: str, found: Any) -> Receipt:
    return Receipt(
        build=build,
        package_digest=found.tags[_DIGEST_TAG],
        evidence_digest=found.tags["dspark.evidence_digest"],
        tracking_uri=registry.uri,
        run_id=found.run_id,
        model_name=found.name,
        version=str(found.version),
    )


def _set_candidate(registry: Registry, receipt: Receipt) -> None:
    registry.client.set_registered_model_alias(receipt.model_name, CANDIDATE, receipt.version)


def _complete_run(registry: Registry, run_id: str) -> None:
    """A run that was stopped after its version existed had logged everything: what was left is done now."""
    if registry.client.get_run(run_id).info.status != "FINISHED":
        registry.client.set_terminated(run_id, "FINISHED")


def _end_stale_runs(registry: Registry, publisher: str) -> None:
    """Mark as killed what a dead process left running: under the lock, nobody publishes from this workspace."""
    wanted = f"attributes.status = 'RUNNING' and tags.`{_PUBLISHER_TAG}` = '{publisher}'"
    for run in registry.client.search_runs([registry.experiment_id], wanted):
        registry.client.set_terminated(run.info.run_id, "KILLED")


def _discard_leftovers(registry: Registry, manifest: Manifest) -> None:
    """Drop the models that interrupted attempts logged for this package and never registered; they are large."""
    # Another build may have a package of the very same files: its models stay.
    wanted = f"tags.`{_DIGEST_TAG}` = '{manifest.digests.package_digest}' and tags.`{_BUILD_TAG}` = '{manifest.build}'"
    for model in registry.client.search_logged_models([registry.experiment_id], filter_string=wanted):
        registry.client.delete_logged_model(model.model_id)
        if registry.artifacts is not None and re.fullmatch(r"m-[0-9a-f]{32}", model.model_id):
            shutil.rmtree(registry.artifacts / "models" / model.model_id, ignore_errors=True)
