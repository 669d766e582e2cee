"""Services that tests run against for real. `make test-services` fails where one is missing; `make test` says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REQUIRED = "DSPARK_TEST_SERVICES"

sys.path[:0] = [
    str(HERE),
    *(str(HERE.parent / folder) for folder in ("unit/registry", "unit/package", "integration")),
]


@pytest.fixture(scope="session")
def asked_for() -> None:
    if not os.environ.get(REQUIRED):
        pytest.skip("starts services: make test-services")


@pytest.fixture(scope="session")
def postgresql(asked_for: None) -> Iterator[str]:
    """Address of a server's databases, to which a name is added."""
    import postgres

    if (reason := postgres.missing()) is not None:
        pytest.fail(reason, pytrace=False)
    with postgres.cluster() as found:
        yield found.address


@pytest.fixture(scope="session")
def s3(asked_for: None) -> Iterator[Any]:
    """A client of an S3 server on loopback with one bucket, `models`; the environment names it to MLflow and boto3."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    settings = {
        "MLFLOW_S3_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket="models")
        yield client
    server.stop()
