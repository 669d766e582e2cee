"""Two promotions at once, a hundred times, in each kind of registry; and two that make its schema at once.

The rule needs no lock between machines, only that versions are numbered one by one and that tags come with them. The
registry's own lock is held while a registry is opened, since MLflow's making of a schema is no such single step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fake_build
import postgres
import pytest
import race

from dspark.package.assemble import assemble
from dspark.registry.publish import find_published, publish
from dspark.registry.receipts import default_uri

ROUNDS = int(os.environ.get("DSPARK_RACE_ROUNDS", "100"))


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: Any, tmp_path: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Address of an empty registry."""
    monkeypatch.chdir(
        tmp_path
    )  # without a tracking server, MLflow puts the artifacts of a database below the current folder
    if request.param == "sqlite":
        yield default_uri(tmp_path)
        return
    with postgres.database(postgresql, f"registry{os.getpid()}_{tmp_path.name}") as address:
        yield address


def test_two_promotions_at_once_have_one_winner_each_time(empty, tmp_path, capsys):
    _make_at_once(empty, tmp_path)
    _forked(lambda: _publish(empty, tmp_path))
    result = race.race(empty, tmp_path, ROUNDS)
    with capsys.disabled():
        print(f"\n{empty.partition(':')[0]}: {result}")
    race.check(result, ROUNDS)


def _make_at_once(uri: str, workspace: Path) -> None:
    """Two processes that find no schema and make it."""
    work = [race.forked(lambda: find_published("demo", "0" * 64, workspace=workspace, tracking_uri=uri)) for _ in "ab"]
    assert [race.exit_code(child) for child in work] == [0, 0]


def _publish(uri: str, workspace: Path) -> None:
    """Three versions, which differ in their cost tables."""
    for steps in (60, 61, 62):
        root = workspace / f"steps {steps}"
        sources = fake_build.make(root)
        cost = sources.costs[fake_build.CPU]
        cost.write_text(cost.read_text().replace("60.0", f"{steps}.0"))
        assemble(sources, root / "package", card=fake_build.card)
        publish(root / "package", workspace=workspace, build="demo", receipts=workspace / "receipts", tracking_uri=uri)


def _forked(work: Any) -> None:
    """Connections do not survive a fork, so whatever speaks to the registry before the race does so in a child."""
    child = race.forked(work)
    assert race.exit_code(child) == 0
