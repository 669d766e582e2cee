"""The one place that loads mlflow (about three seconds): switches, absolute addresses, experiment, errors."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.errors import ServiceError, SettingsError
from dspark.io.digest import digest_bytes
from dspark.registry.receipts import sqlite_file

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EXPERIMENT = "dspark"
# Read when mlflow is imported: no telemetry, no bars on stderr, nothing inferred from a surrounding uv project.
_SWITCHES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_UV_AUTO_DETECT": "false",
    "MLFLOW_RECORD_ENV_VARS_IN_MODEL_LOGGING": "false",
}
# A server that is down must be noticed in seconds; mlflow's own defaults take four minutes per call.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


@dataclass(frozen=True)
class Registry:
    """An open registry.

    Attributes:
        mlflow: the module, with its tracking address set to `uri`.
        client: speaks to `uri` for tracking and registry alike.
        experiment_id: of the experiment that dspark's runs stand in.
        artifacts: the local folder of the experiment's artifacts, None if they lie elsewhere.
    """

    uri: str
    mlflow: Any
    client: MlflowClient
    experiment_id: str
    artifacts: Path | None


@contextmanager
def opened(uri: str) -> Iterator[Registry]:
    """Open the registry at `uri`, creating its database and experiment if they are not there.

    Creating takes several seconds and two processes must not do it at once: call it under the registry's lock.

    Raises:
        SettingsError: a SQLite address that is not absolute.
        ServiceError: whatever mlflow could not do, with its reason.
    """
    database = sqlite_file(uri)
    if database is not None:
        if not database.is_absolute():
            raise SettingsError(
                f"tracking address {uri!r} follows the current folder",
                "give an absolute one: sqlite:////folder/mlflow.db",
            )
        database.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(_SWITCHES)
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    import mlflow
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    artifacts = None if database is None else database.parent / "artifacts"
    try:
        mlflow.set_tracking_uri(uri)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice to authors of models, coloured, on stderr
            client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            yield Registry(uri, mlflow, client, _experiment(client, artifacts), artifacts)
    except (MlflowException, SQLAlchemyError) as reason:
        first = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
        raise ServiceError(
            f"MLflow at {uri}: {first}",
            "see that the tracking server is up and the disk is not full, then `dspark run`",
        ) from reason
    finally:
        mlflow.set_tracking_uri(before)


def _experiment(client: MlflowClient, artifacts: Path | None) -> str:
    """The experiment whose artifacts lie where they should.

    MLflow writes an experiment's artifacts to the absolute folder that it was created with; after a workspace has been
    moved that is another place, so such a workspace gets an experiment of its own.
    """
    location = None if artifacts is None else artifacts.as_uri()
    name = EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is not None and location is not None and found.artifact_location != location:
        name = f"{EXPERIMENT}-{digest_bytes(location.encode('utf-8'))[:8]}"
        found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=location))
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)
