"""Register one package in a run: one version with alias `candidate`; the same package and evidence never twice.

The order makes every interruption harmless: model and records are complete before the version exists, the version
carries the package's digests from its first moment, the alias comes last. Whatever is done again finds by them what
is there already.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dspark import __version__
from dspark.errors import ServiceError
from dspark.io.progress import Progress
from dspark.package.manifest import Manifest
from dspark.registry import records
from dspark.registry.reach import shown
from dspark.registry.receipts import Receipt
from dspark.registry.space import require_space
from dspark.registry.tracking import Registry, uploading

CANDIDATE = "candidate"
_MODEL_CODE = Path(__file__).with_name("pyfunc_model.py")
_DIGEST_TAG = "dspark.package_digest"
_EVIDENCE_TAG = "dspark.evidence_digest"
_BUILD_TAG = "dspark.build"
JOURNAL_TAG = "dspark.journal"


def model_name(build: str) -> str:
    """The registered model of a build."""
    return f"dspark-{build}"


def register(
    registry: Registry,
    run_id: str,
    package: Path,
    manifest: Manifest,
    *,
    journal: str,
    stages: Sequence[Mapping[str, Any]],
    at_milliseconds: int,
    progress: Progress,
) -> Receipt:
    """Make a verified package the candidate of its build, in a run that exists.

    Args:
        journal: of the run; what an interrupted attempt left is known by it.
        stages: how the run's stages ended, `{stage, key, status}`.
        at_milliseconds: since the epoch; the time of all metrics, so that logging them again adds nothing.
        progress: reported to between steps, each a safe point.
    Raises:
        PreflightError: there is no room for the copies.
        ServiceError: MLflow could not do what was asked.
        Interrupted: at a safe point.
    """
    digests = manifest.digests
    receipt = version_of(registry, manifest.build, digests.package_digest, digests.evidence_digest)
    if receipt is None:
        _discard_leftovers(registry, journal)
        require_space(package, sum(entry.bytes for entry in manifest.files), registry.artifacts)
        tags = records.tags(package, manifest, stages)
        model_uri, model_id = _log_model(registry, run_id, package, manifest, journal)
        progress.advance()
        _log_records(registry, run_id, package, manifest, tags, at_milliseconds)
        progress.advance()
        name = model_name(manifest.build)
        _require_model(registry, name)
        # The tags are written in the same transaction as the version. A server takes no source without its model's id.
        registry.client.create_model_version(
            name, model_uri, run_id, tags={**tags, JOURNAL_TAG: journal}, model_id=model_id
        )
        receipt = _settled(registry, manifest, journal)
        progress.advance()
    set_candidate(registry, receipt)
    return receipt


def set_candidate(registry: Registry, receipt: Receipt) -> None:
    """Let `candidate` name this version."""
    registry.client.set_registered_model_alias(receipt.model_name, CANDIDATE, receipt.version)


def version_of(registry: Registry, build: str, package_digest: str, evidence_digest: str) -> Receipt | None:
    """The first version of a build's model that carries both digests.

    A package that was measured again has the same package_digest and other evidence. Gates read the evidence in the
    registry, so it is another version.
    """
    found = _versions(registry, build, package_digest, evidence_digest)
    return _receipt(registry, build, found[0]) if found else None


def newest_version_of(registry: Registry, build: str, package_digest: str) -> Receipt | None:
    """The version of a build's model that carries the package's digest and the newest evidence."""
    found = _versions(registry, build, package_digest)
    return _receipt(registry, build, found[-1]) if found else None


def _versions(registry: Registry, build: str, package_digest: str, evidence_digest: str | None = None) -> list[Any]:
    wanted = f"name = '{model_name(build)}' and tags.`{_DIGEST_TAG}` = '{package_digest}'"
    if evidence_digest is not None:
        wanted += f" and tags.`{_EVIDENCE_TAG}` = '{evidence_digest}'"
    return sorted(registry.client.search_model_versions(wanted), key=lambda item: int(item.version))


def _settled(registry: Registry, manifest: Manifest, journal: str) -> Receipt:
    """The version that counts after one was created: the lowest.

    Two machines may register one package at once, and a creation that got no answer may arrive after it was repeated.
    Of versions with the same digests the lowest is the package's; ours, if it is another one, is taken back.
    """
    digests = manifest.digests
    first, *others = _versions(registry, manifest.build, digests.package_digest, digests.evidence_digest)
    for double in others:
        if double.tags.get(JOURNAL_TAG) == journal:
            registry.client.delete_model_version(double.name, double.version)
    return _receipt(registry, manifest.build, first)


def _receipt(registry: Registry, build: str, found: Any) -> Receipt:
    return Receipt(
        build=build,
        package_digest=found.tags[_DIGEST_TAG],
        evidence_digest=found.tags[_EVIDENCE_TAG],
        tracking_uri=shown(registry.uri),
        run_id=found.run_id,
        model_name=found.name,
        version=str(found.version),
    )


def _require_model(registry: Registry, name: str) -> None:
    from mlflow.exceptions import MlflowException

    if registry.client.search_registered_models(filter_string=f"name = '{name}'"):
        return
    try:
        registry.client.create_registered_model(name)
    except MlflowException as reason:
        if reason.error_code != "RESOURCE_ALREADY_EXISTS":  # somebody else was quicker
            raise


def _log_records(
    registry: Registry,
    run_id: str,
    package: Path,
    manifest: Manifest,
    tags: Mapping[str, str],
    at_milliseconds: int,
) -> None:
    from mlflow.entities import Metric, Param, RunTag

    params = [Param(key, value) for key, value in records.parameters(manifest).items()]
    metrics = [Metric(key, value, at_milliseconds, 0) for key, value in records.metrics(package).items()]
    metrics += [Metric(key, value, at_milliseconds, step) for key, value, step in records.curves(package)]
    for start in range(0, len(params), 100):  # MLflow's limits per call
        registry.client.log_batch(run_id, params=params[start : start + 100])
    for start in range(0, len(metrics), 1000):
        registry.client.log_batch(run_id, metrics=metrics[start : start + 1000])
    named = [RunTag(key, value) for key, value in tags.items()]
    for start in range(0, len(named), 100):
        registry.client.log_batch(run_id, tags=named[start : start + 100])


def _log_model(registry: Registry, run_id: str, package: Path, manifest: Manifest, journal: str) -> tuple[str, str]:
    """Log the package as a model from code: the code file and the package, nothing pickled.

    Returns:
        the model's address and its id.
    """
    import numpy as np
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, ParamSpec, Schema, TensorSpec

    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("float32"), (-1, manifest.drafter.gamma))]),
        outputs=Schema([TensorSpec(np.dtype("int64"), (-1,))]),
        params=ParamSchema([ParamSpec("profile", "string", ""), ParamSpec("temperature", "double", 0.0)]),
    )
    # Named, so that mlflow does not start processes to find out; the light base of dspark is enough.
    requirements = [f"dspark=={__version__}", *(f"{name}=={version(name)}" for name in ("mlflow", "numpy"))]
    tags = {_DIGEST_TAG: manifest.digests.package_digest, _BUILD_TAG: manifest.build, JOURNAL_TAG: journal}
    # Made here, and not by `log_model`: that would set a run which has ended to running, and ask for the history of
    # each of its metrics.
    model = registry.client.create_logged_model(
        registry.experiment_id, name="package", source_run_id=run_id, tags=tags, params=records.parameters(manifest)
    )
    try:
        with uploading():
            info = registry.mlflow.pyfunc.log_model(
                name="package",
                model_id=model.model_id,
                python_model=str(_MODEL_CODE),
                artifacts={"package": str(package.resolve())},
                signature=signature,
                pip_requirements=requirements,
            )
    except OSError as reason:
        if registry.artifacts is None:
            raise
        raise ServiceError(
            f"{package} could not be copied to {registry.artifacts}: {reason}", "make room, then: dspark registry sync"
        ) from reason
    registry.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    return str(info.model_uri), str(model.model_id)


def _discard_leftovers(registry: Registry, journal: str) -> None:
    """Drop the models that interrupted attempts logged for this run and never registered; they are large."""
    wanted = f"tags.`{JOURNAL_TAG}` = '{journal}'"
    for model in registry.client.search_logged_models([registry.experiment_id], filter_string=wanted):
        registry.client.delete_logged_model(model.model_id)
        if registry.artifacts is not None and re.fullmatch(r"m-[0-9a-f]{32}", model.model_id):
            shutil.rmtree(registry.artifacts / "models" / model.model_id, ignore_errors=True)
