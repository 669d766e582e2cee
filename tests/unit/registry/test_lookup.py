"""What holds a stage is what was promoted last, whatever the alias says."""

from __future__ import annotations

import pytest
from fake_server import serving

from dspark.errors import IntegrityError, ServiceError
from dspark.registry.chain import Link
from dspark.registry.lookup import find_version

ADDRESS, STAGE = "models:/dspark-demo@production", "dspark-demo-production"


@pytest.fixture
def server(tmp_path):
    """Two versions of dspark-demo; the alias names the second."""
    with serving(tmp_path) as server:
        for number in ("1", "2"):
            server.register(f"mlflow-artifacts:/{number}", {"dspark.package_digest": number * 64}, number=number)
        yield server


def promoted(server, version: int, source: int, replaces: int) -> dict[str, str]:
    """Register a copy as a promotion writes it; its tags."""
    link = Link(version, f"id{version}", source, str(source) * 64, replaces, "promotion", "ada", "now", "c0ffee")
    tags = {"dspark.package_digest": link.package_digest, **link.tags(STAGE)}
    server.register(f"mlflow-artifacts:/{source}", tags, name=STAGE, number=str(version))
    return tags


def test_an_alias_counts_where_nothing_was_promoted(server):
    assert find_version(ADDRESS, server.address).number == "2"


def test_history_counts_where_something_was(server):
    """The promotion of version 2 lost to a later one of 1, and the alias was left behind by a kill."""
    promoted(server, 1, 2, 0)
    promoted(server, 2, 1, 1)
    promoted(server, 3, 2, 1)
    found = find_version(ADDRESS, server.address)
    assert (found.name, found.number, found.artifacts) == ("dspark-demo", "1", "mlflow-artifacts:/1")
    assert find_version("models:/dspark-demo/2", server.address).number == "2"


def test_history_that_cannot_be_read_is_no_reason_to_believe_the_alias(server):
    tags = promoted(server, 1, 1, 0)
    tags["dspark.promotion.replaces"] = "seven"
    with pytest.raises(IntegrityError, match=f"{STAGE} version 1"):
        find_version(ADDRESS, server.address)
    server.faults["model-versions/search"] = lambda handler: handler.answer(200, {"model_versions": [{"name": STAGE}]})
    with pytest.raises(ServiceError, match=STAGE):
        find_version(ADDRESS, server.address)
