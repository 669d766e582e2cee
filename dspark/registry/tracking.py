"""The one place that loads mlflow (about three seconds): switches, absolute addresses, experiment, errors."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.errors import PreflightError, ServiceError, SettingsError
from dspark.io.digest import digest_bytes
from dspark.io.disk import disk_error
from dspark.registry.reach import PATIENCE_SECONDS, AwayError, require_server, shown
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
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # where --json prints one document
}
_RETRIES, _TIMEOUT = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"
# Between the last byte of a large file and the answer, a server may have to pass it on to an object store.
_UPLOAD_TIMEOUT_SECONDS = 300


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
def opened(
    uri: str,
    *,
    retries: int = 0,
    patience_seconds: float = PATIENCE_SECONDS,
    again: str = "give the same command again",
) -> Iterator[Registry]:
    """Open the registry at `uri`, creating its database and experiment if they are not there.

    Creating takes several seconds and two processes must not do it at once: call it under the registry's lock.

    Args:
        uri: the address.
        retries: of each call. mlflow repeats whatever got no answer, creations too, which would then be there twice:
            only for those who change nothing.
        patience_seconds: how long to wait for a server that does not answer.
        again: what is to be done once a full disk has room.
    Raises:
        SettingsError: a SQLite address that is not absolute.
        PreflightError: the disk of a SQLite registry is full.
        AwayError: the server does not answer, or stopped answering.
        ServiceError: whatever else mlflow could not do, with its reason.
    """
    database = sqlite_file(uri)
    if database is not None:
        if not database.is_absolute():
            raise SettingsError(
                f"tracking address {uri!r} follows the current folder",
                "give an absolute one: sqlite:////folder/mlflow.db",
            )
        database.parent.mkdir(parents=True, exist_ok=True)
    require_server(uri, patience_seconds)
    os.environ.update(_SWITCHES)
    # A server that is away must be noticed in seconds; mlflow's own defaults take four minutes per call.
    timeout = os.environ.get(_TIMEOUT) or str(math.ceil(patience_seconds))
    with _environment({_RETRIES: str(retries), _TIMEOUT: timeout}):
        yield from _opened(uri, database, again)


def _opened(uri: str, database: Path | None, again: str) -> Iterator[Registry]:
    import mlflow
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    for name in ("mlflow", "alembic"):
        # What mlflow logs as an error, with its traceback, it raises as well: it is told below, in one line.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    artifacts = None if database is None else database.parent / "artifacts"
    try:
        mlflow.set_tracking_uri(uri)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice to authors of models, coloured, on stderr
            client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            yield Registry(uri, mlflow, client, _experiment(client, artifacts), artifacts)
    except (MlflowException, SQLAlchemyError, RequestException) as reason:
        told = f"MLflow at {shown(uri)}: {_first_line(reason).replace(uri, shown(uri))}"
        if database is not None and (known := disk_error(reason, again)) is not None:
            raise PreflightError(told, known.hint) from reason
        error = ServiceError if _refused(reason) or database is not None else AwayError
        raise error(
            told,
            "see that the tracking server is up and the disk is not full, then give the command again",
        ) from reason
    except _store_errors() as reason:
        error = ServiceError if _refused_by_store(reason) else AwayError
        raise error(
            f"the object store that MLflow at {shown(uri)} keeps artifacts in: {_first_line(reason)}",
            "see that it can be reached and written from here, then: dspark registry sync",
        ) from reason
    finally:
        mlflow.set_tracking_uri(before)


def _store_errors() -> tuple[type[Exception], ...]:
    """What boto3 raises where the server lets its clients write to S3; nothing while it is not loaded."""
    if "boto3" not in sys.modules:
        return ()
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return (Boto3Error, BotoCoreError, ClientError)


def _refused_by_store(reason: Any) -> bool:
    """True if the store answered; what boto3 makes of a failed upload says no more than that it was no connection."""
    response = getattr(reason, "response", None)
    if response is None:
        return type(reason).__module__.startswith("boto3.")
    return bool(response["ResponseMetadata"].get("HTTPStatusCode", 400) < 500)


def _first_line(reason: Exception) -> str:
    """What went wrong; SQLAlchemy may say before it in the course of what."""
    lines = (line.strip() for line in str(reason).splitlines())
    return next((line for line in lines if line and not line.startswith("(raised as a")), type(reason).__name__)


def _refused(reason: Any) -> bool:
    """True if a server answered that it will not do what was asked; asking again would not help."""
    if hasattr(reason, "get_http_status_code"):
        return bool(reason.get_http_status_code() < 500)
    response = getattr(reason, "response", None)
    return response is not None and response.status_code < 500


@contextmanager
def uploading() -> Iterator[None]:
    """Wait longer for each answer: files are on their way."""
    with _environment({_TIMEOUT: str(_UPLOAD_TIMEOUT_SECONDS)}):
        yield


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which mlflow reads at each call, for the duration of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _experiment(client: MlflowClient, artifacts: Path | None) -> str:
    """The experiment whose artifacts lie where they should.

    MLflow writes an experiment's artifacts to the absolute folder that it was created with; after a workspace has been
    moved that is another place, so such a workspace gets an experiment of its own.
    """
    from mlflow.exceptions import MlflowException

    location = None if artifacts is None else artifacts.as_uri()
    name = EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is not None and location is not None and found.artifact_location != location:
        name = f"{EXPERIMENT}-{digest_bytes(location.encode('utf-8'))[:8]}"
        found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # somebody else was quicker
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)
