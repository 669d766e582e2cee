"""The registry as it runs in production: `mlflow server` on PostgreSQL, artifacts in S3, two ways to reach them.

Handed out by the server, clients have no credentials of the bucket; read from the bucket, no weight passes the server.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fake_build
import mlflow_server
import postgres
import pytest
import race

from dspark.cli.boundary import run_command
from dspark.errors import ServiceError
from dspark.package.assemble import assemble
from dspark.package.verify import read_manifest
from dspark.registry.connection import connected
from dspark.registry.lookup import find_version
from dspark.registry.publish import publish, spool_of
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Silent
from dspark.workspace.publisher import sync

CHECKOUT = Path(__file__).resolve().parents[2]
AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "MLFLOW_S3_ENDPOINT_URL")


@dataclass(frozen=True)
class Production:
    """A registry.

    Attributes:
        url: of the server.
        database: that it keeps everything but artifacts in.
        way: to the artifacts: `proxied`, the server hands them out, or `direct`, from the bucket.
        prefix: where they lie in the bucket.
    """

    url: str
    database: str
    way: str
    prefix: str


def options(database: str, way: str, prefix: str) -> tuple[str, ...]:
    """As docs/how-to/production.md gives them."""
    place = f"s3://models/{prefix}"
    if way == "proxied":
        return ("--backend-store-uri", database, "--artifacts-destination", place)
    return ("--backend-store-uri", database, "--no-serve-artifacts", "--default-artifact-root", place)


@pytest.fixture(scope="module", params=["proxied", "direct"])
def production(request, postgresql, s3, tmp_path_factory):
    prefix = f"registry-{request.param}"
    with (
        postgres.database(postgresql, prefix) as database,
        mlflow_server.mlflow_server(
            tmp_path_factory.mktemp(prefix), *options(database, request.param, prefix)
        ) as address,
    ):
        yield Production(address, database, request.param, prefix)


def package(root: Path, steps_per_second: str, build: str = "demo") -> Path:
    """A package whose costs, and so whose digest, are its own."""
    sources = fake_build.make(root)
    sources = sources.__class__(**{**vars(sources), "build": sources.build.model_copy(update={"name": build})})
    cost = sources.costs[fake_build.CPU]
    cost.write_text(cost.read_text().replace("60.0", steps_per_second))
    assemble(sources, root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> list[Path]:
    return [package(tmp_path_factory.mktemp("made"), f"{steps}.0") for steps in (60, 61)]


def workspace(root: Path) -> Path:
    """The checkout's own declarations, with a build as the packages are of."""
    for name in ("pipeline", "stages", "serving_profiles"):
        shutil.copytree(CHECKOUT / name, root / name)
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copyfile(CHECKOUT / name, root / name)
    (root / "serving_profiles/cpu-reference.yaml").write_text("engine: reference\naccess: local\nthreads: 1\n")
    (root / "pipeline/builds/demo.yaml").write_text("target: tiny\nserving_profiles: [cpu-reference]\n")
    return root


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def push(made: Path, root: Path, url: str, build: str = "demo", receipts: str = "receipts"):
    return publish(made, workspace=root, build=build, receipts=root / receipts, tracking_uri=url)


def test_from_a_package_to_production_and_back(production, s3, packages, tmp_path, monkeypatch, capsys):
    """Publish two, promote both, pull, roll back, pull: by the command line, as a team would."""
    root = workspace(tmp_path / "work space")

    def dspark(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        got = run_command(["--workspace", str(root), *arguments, "--tracking-uri", production.url])
        out, err = capsys.readouterr()
        assert got == code, err
        return out

    if production.way == "proxied":  # the server's business alone
        for name in AWS:
            monkeypatch.delenv(name)
    assert [push(made, root, production.url).version for made in packages] == ["1", "2"]
    assert push(packages[0], root, production.url, receipts="lost").version == "1"  # known by its digests
    address = find_version("models:/dspark-demo/1", production.url).artifacts
    assert address.startswith(
        "mlflow-artifacts:/" if production.way == "proxied" else f"s3://models/{production.prefix}/"
    )
    keys = [item["Key"] for item in s3.list_objects_v2(Bucket="models", Prefix=production.prefix)["Contents"]]
    assert sum(key.endswith("/drafter/model.safetensors") for key in keys) == 2
    assert not list(root.rglob("*.safetensors"))  # nothing of it is kept here

    force = ("--to", "production", "--force", "--reason", "made-up measurements", "--json")
    assert json.loads(dspark("promote", "demo", "--version", "1", *force))["outcome"] == "done"
    assert json.loads(dspark("promote", "demo", "--version", "2", *force))["replaces"] == 1
    served, production_address = tmp_path / "served", "models:/dspark-demo@production"
    dspark("package", "pull", production_address, str(served))
    assert tree(served) == tree(packages[1])
    dspark("rollback", "demo", "--reason", "slower under load")
    dspark("package", "pull", production_address, str(served))
    assert tree(served) == tree(packages[0])
    told = json.loads(dspark("registry", "history", "demo", "--json"))
    assert [link["kind"] for link in told["history"]] == ["promotion", "promotion", "rollback"]
    assert told["void"] == []
    held = json.loads(dspark("registry", "list", "--json"))
    assert "dspark-demo" in json.dumps(held)


def test_two_teams_share_a_registry(production, tmp_path):
    """Each publishes its own build at the same time, and both one and the same package: that is there once."""
    root = {team: tmp_path / team for team in ("red", "blue")}
    shared = package(tmp_path / "shared", "70.0", "shared")
    own = {team: package(tmp_path / f"{team} build", "60.0", team) for team in root}

    def work(team: str) -> None:
        root[team].mkdir()
        push(own[team], root[team], production.url, team)
        push(shared, root[team], production.url, "shared", "receipts of shared")

    children = [race.forked(lambda team=team: work(team)) for team in root]
    assert [race.exit_code(child) for child in children] == [0, 0]
    with connected(production.url, workspace=tmp_path) as registry:
        digest = read_manifest(shared).digests.package_digest
        for build in ("red", "blue", "shared"):
            found = registry.client.search_model_versions(f"name = 'dspark-{build}'")
            model = registry.client.get_registered_model(f"dspark-{build}")
            assert [model.aliases["candidate"]] == [str(one.version) for one in found]
            assert build != "shared" or [one.tags["dspark.package_digest"] for one in found] == [digest]


def test_a_database_that_is_away_costs_nothing_but_time(s3, packages, tmp_path):
    """The server is up and cannot ask its database: exit code 8 and all kept; back again, all is delivered once."""
    server, root = tmp_path / "server", tmp_path / "work"
    server.mkdir()
    root.mkdir()
    with (
        postgres.cluster() as cluster,
        postgres.database(cluster.address, "away") as database,
        mlflow_server.mlflow_server(server, *options(database, "proxied", "away")) as url,
    ):
        assert push(packages[0], root, url).version == "1"
        cluster.stop()
        refused(lambda: push(packages[1], root, url))
        cluster.start()
        delivered(root, url, "dspark-demo/2")


def test_a_bucket_that_is_away_costs_nothing_but_time(production, tmp_path, monkeypatch):
    """Whoever writes to it, the server or its clients: the same."""
    server, root = tmp_path / "server", tmp_path / "work"
    server.mkdir()
    root.mkdir()
    build = f"bucket-{production.way}"
    made = package(tmp_path / "made", "80.0", build)
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", f"http://127.0.0.1:{mlflow_server.free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    if production.way == "proxied":
        with mlflow_server.mlflow_server(server, *options(production.database, "proxied", production.prefix)) as url:
            refused(lambda: push(made, root, url, build))
    else:
        refused(lambda: push(made, root, production.url, build))
    monkeypatch.undo()
    delivered(root, production.url, f"dspark-{build}/1")


def refused(work: Callable[[], object]) -> None:
    """Within seconds, saying what delivers it later."""
    started = time.monotonic()
    with pytest.raises(ServiceError) as error:
        work()
    assert error.value.exit_code == 8 and "dspark registry sync" in error.value.hint
    assert time.monotonic() - started < 60


def delivered(root: Path, url: str, version: str) -> None:
    delivery = sync(Workspace(root), url, Silent())
    assert [run.registered for run in delivery.runs] == [(version,)] and delivery.problems == []
    assert spool_of(root).folders() == []
