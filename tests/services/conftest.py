"""Services that tests run against for real. `make test-services` fails where one is missing; `make test` says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REQUIRED = "DSPARK_TEST_SERVICES"

sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "registry"), str(HERE.parent / "unit" / "package")]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """Address of a server's databases, to which a name is added."""
    import postgres

    reason = postgres.missing()
    if not os.environ.get(REQUIRED):
        pytest.skip("starts services: make test-services")
    if reason is not None:
        pytest.fail(reason, pytrace=False)
    with postgres.cluster() as address:
        yield address
