"""A real tracking server that is away, comes back, or dies at any call: nothing is lost, nothing is there twice."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fake_build
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # flaky_proxy.py

from flaky_proxy import FlakyProxy

from dspark.errors import IntegrityError, PreflightError
from dspark.package.assemble import assemble
from dspark.package.verify import read_manifest, verify
from dspark.registry import register, space, tracking
from dspark.registry.delivery import deliver, waiting_copy
from dspark.registry.events import Ended, StageEnded
from dspark.registry.publish import package_to_publish, publish, spool_of
from dspark.registry.reach import AwayError
from dspark.registry.receipts import known_receipt
from dspark.registry.spool import append
from dspark.registry.tracking import opened

pytestmark = pytest.mark.slow
AWAY = "http://127.0.0.1:9"
STAGES = [("train", "ran", 2.5), ("package", "ran", 0.5)]


def spooled(workspace: Path, package: Path | None, run: str = "run-1", status: str = "FINISHED") -> None:
    """A run as `dspark run` writes it down."""
    code, message = (0, "") if status == "FINISHED" else (5, "stage train: out of memory")
    folder = spool_of(workspace).begin(run, "demo", "dspark run --build demo")
    for number, (stage, how, seconds) in enumerate(STAGES):
        append(
            folder, StageEnded(time=100.0 + number, stage=stage, key="demo", status=how, metrics={"seconds": seconds})
        )
    append(folder, Ended(time=103.0, status=status, exit_code=code, message=message))
    if package is not None:
        append(folder, package_to_publish(package, read_manifest(package), workspace))


@pytest.fixture(autouse=True)
def busy_machines_are_slow(monkeypatch):
    """Deaths are noticed by closed connections here; an answer may take its time."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")


def delivered(workspace: Path, uri: str, patience: float = 60.0):
    return deliver(
        spool_of(workspace),
        workspace=workspace,
        tracking_uri=uri,
        receipts=workspace / "receipts",
        patience_seconds=patience,
    )


class Server:
    """What a tracking server knows."""

    def __init__(self, url: str) -> None:
        import mlflow

        self.client = mlflow.MlflowClient(url, url)

    def runs(self, run: str):
        ids = [item.experiment_id for item in self.client.search_experiments()]
        return self.client.search_runs(ids, f"tags.`dspark.run` = '{run}'")

    def versions(self):
        return self.client.search_model_versions("name = 'dspark-demo'")

    def models(self):
        ids = [item.experiment_id for item in self.client.search_experiments()]
        return self.client.search_logged_models(ids, filter_string="tags.`dspark.build` = 'demo'")

    def clear(self) -> None:
        for model in self.client.search_registered_models("name = 'dspark-demo'"):
            self.client.delete_registered_model(model.name)
        for model in self.models():
            self.client.delete_logged_model(model.model_id)
        ids = [item.experiment_id for item in self.client.search_experiments()]
        for run in self.client.search_runs(ids):
            self.client.delete_run(run.info.run_id)


@pytest.fixture
def server(mlflow_server):
    known = Server(mlflow_server)
    yield known
    known.clear()


def assert_complete(server: Server, workspace: Path, run: str = "run-1") -> None:
    """Everything of the run is on the server once, and the spool is empty."""
    (found,) = server.runs(run)
    assert (found.info.status, found.info.end_time) == ("FINISHED", 103_000)
    for stage, how, seconds in STAGES:
        history = server.client.get_metric_history(found.info.run_id, f"stage.{stage}.demo.seconds")
        assert [point.value for point in history] == [seconds]
        assert found.data.tags[f"dspark.stage.{stage}.demo"] == how
    curve = server.client.get_metric_history(found.info.run_id, "train.loss")
    assert [(point.step, point.value) for point in curve] == [(1, 3.5), (2, 3.25)]
    assert found.data.params["recipe.training.steps"] == "5"
    (version,) = server.versions()
    assert (version.run_id, str(version.version)) == (found.info.run_id, found.data.tags["dspark.model_version"][-1])
    candidate = server.client.get_model_version_by_alias("dspark-demo", "candidate")
    assert str(candidate.version) == str(version.version)
    (model,) = server.models()
    assert str(model.status) == "READY" and version.source.endswith(model.model_id)
    assert spool_of(workspace).folders() == []


def test_a_run_and_its_package_reach_a_server_that_stores_them(pristine, tmp_path, mlflow_server, server, monkeypatch):
    """Files pass through the server here, which dies in the middle of the fourth at first."""
    monkeypatch.setattr(tracking, "EXPERIMENT", "dspark-kept-by-the-server")
    spooled(tmp_path, pristine)
    with FlakyProxy(mlflow_server).serving() as proxy:
        proxy.dies_in_upload = 3
        with pytest.raises(AwayError):
            delivered(tmp_path, proxy.url, 1.0)
        assert proxy.dead and proxy.calls[-1].startswith("PUT ")
    (run,) = delivered(tmp_path, mlflow_server).runs
    assert_complete(server, tmp_path)
    assert (run.run, run.status, run.registered) == ("run-1", "FINISHED", ("dspark-demo/1",))
    digests = read_manifest(pristine).digests
    assert known_receipt(tmp_path / "receipts", "demo", digests, mlflow_server) == run.receipts[0]
    import mlflow

    mlflow.set_tracking_uri(mlflow_server)
    try:
        folder = mlflow.artifacts.download_artifacts("models:/dspark-demo@candidate", dst_path=str(tmp_path / "copy"))
    finally:
        mlflow.set_tracking_uri(None)
    verify(next(Path(folder).rglob("manifest.json")).parent, digest=digests.package_digest)


def test_a_server_that_is_away_is_given_up_and_told_everything_when_it_is_back(
    pristine, tmp_path, mlflow_server, server
):
    spooled(tmp_path, None, "run-0", "FAILED")
    spooled(tmp_path, pristine)
    started = time.monotonic()
    with pytest.raises(AwayError, match="refused") as caught:
        delivered(tmp_path, AWAY, 1.0)
    assert 0.4 < time.monotonic() - started < 3
    digest = read_manifest(pristine).digests.package_digest
    assert "dspark registry sync" in caught.value.hint
    assert "run run-0 of build demo, FAILED\n" in caught.value.hint
    assert f"run run-1 of build demo, FINISHED, package {digest[:12]}" in caught.value.hint
    assert len(spool_of(tmp_path).folders()) == 2
    assert [run.run for run in delivered(tmp_path, mlflow_server).runs] == ["run-0", "run-1"]
    assert_complete(server, tmp_path)
    (failed,) = server.runs("run-0")
    assert failed.info.status == "FAILED" and failed.data.tags["dspark.message"] == "stage train: out of memory"
    assert delivered(tmp_path, AWAY).runs == []  # nothing waits, nobody is asked


def test_publishing_twice_while_the_server_is_away_spools_one_package(pristine, tmp_path, mlflow_server, server):
    def send(uri: str):
        folder = tmp_path / "receipts"
        return publish(
            pristine, workspace=tmp_path, build="demo", receipts=folder, tracking_uri=uri, patience_seconds=0.1
        )

    for _ in range(2):
        with pytest.raises(AwayError):
            send(AWAY)
    assert len(spool_of(tmp_path).folders()) == 1
    assert send(mlflow_server).version == "1"
    assert len(server.versions()) == 1 and spool_of(tmp_path).folders() == []


def changes_of_a_delivery(pristine, folder: Path, proxy: FlakyProxy, server: Server) -> list[str]:
    spooled(folder, pristine, "run-clean")
    proxy.revive()
    delivered(folder, proxy.url)
    made = proxy.calls
    server.clear()
    return made


@pytest.mark.long
def test_a_server_that_dies_at_any_call_has_everything_once_in_the_end(pristine, tmp_path, mlflow_server, server):
    """Death before a call leaves the server as death after the call before it, where only the answer was lost."""
    with FlakyProxy(mlflow_server).serving() as proxy:
        calls = changes_of_a_delivery(pristine, tmp_path / "clean", proxy, server)
        assert len(calls) > 10
        for number, how in [(0, "before"), *((number, "after") for number in range(len(calls)))]:
            run = f"run-{how}-{number}"
            workspace = tmp_path / run
            spooled(workspace, pristine, run)
            proxy.die_at(number, how)
            with pytest.raises(AwayError):
                delivered(workspace, proxy.url, 0.6)
            assert proxy.dead and len(spool_of(workspace).folders()) == 1, calls[number]
            proxy.revive()
            delivered(workspace, proxy.url)
            assert_complete(server, workspace, run)
            server.clear()


def test_a_server_that_is_back_within_the_patience_costs_no_second_command(pristine, tmp_path, mlflow_server, server):
    with FlakyProxy(mlflow_server).serving() as proxy:
        spooled(tmp_path, pristine)
        proxy.die_at(3, "after")
        back = threading.Timer(0.6, proxy.revive)
        back.start()
        delivered(tmp_path, proxy.url, 10.0)
        back.join()
    assert_complete(server, tmp_path)


def test_creations_that_arrive_after_they_were_repeated_are_taken_back(pristine, tmp_path, mlflow_server, server):
    """A run and a version that nobody answered for."""
    spooled(tmp_path, pristine)
    started = spool_of(tmp_path).journals()[0][0].started
    with FlakyProxy(mlflow_server).serving() as proxy:
        proxy.die_at(1, "before")  # the run is there, none of its stages
        with pytest.raises(AwayError):
            delivered(tmp_path, proxy.url, 1.0)
    (run,) = server.runs("run-1")
    server.client.create_run(run.info.experiment_id, tags={**run.data.tags, "dspark.events": "0"})
    assert len(server.runs("run-1")) == 2
    delivered(tmp_path, mlflow_server)
    assert_complete(server, tmp_path)
    (version,) = server.versions()
    model_id = version.source.rpartition("/")[2]
    server.client.create_model_version(
        "dspark-demo", version.source, run.info.run_id, tags=version.tags, model_id=model_id
    )
    assert len(server.versions()) == 2
    with opened(mlflow_server) as registry:
        kept = register._settled(registry, read_manifest(pristine), started.journal)
    assert kept.version == str(version.version)
    assert_complete(server, tmp_path)


def test_a_package_that_another_run_replaced_is_registered_from_its_copy(tmp_path, mlflow_server, server):
    sources = fake_build.make(tmp_path / "sources")
    package = tmp_path / "builds" / "demo" / "package"
    assemble(sources, package, card=fake_build.card)
    manifest = read_manifest(package)
    digest, copy = (
        manifest.digests.package_digest,
        waiting_copy(tmp_path, package_to_publish(package, manifest, tmp_path)),
    )
    spooled(tmp_path, package)
    copy.parent.mkdir(parents=True)
    shutil.move(package, copy)
    cost = sources.costs[fake_build.CPU]
    cost.write_text(cost.read_text().replace("60.0", "61.0"))
    assemble(sources, package, card=fake_build.card)
    spooled(tmp_path, package, "run-2")
    runs = delivered(tmp_path, mlflow_server).runs
    assert runs[0].receipts[0].package_digest == digest and not copy.exists()
    assert runs[1].receipts[0].package_digest == read_manifest(package).digests.package_digest != digest
    versions = {str(item.version): item.tags["dspark.package_digest"] for item in server.versions()}
    assert versions["1"] == digest and len(versions) == 2
    assert str(server.client.get_model_version_by_alias("dspark-demo", "candidate").version) == "2"


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_package_that_is_gone_or_damaged_holds_nothing_up(pristine, tmp_path, mlflow_server, server, damage):
    package = tmp_path / "builds" / "demo" / "package"
    shutil.copytree(pristine, package)
    spooled(tmp_path, package)
    if damage == "gone":
        shutil.rmtree(package)
    else:
        (package / "README.md").write_bytes(b"changed")
    spooled(tmp_path, None, "run-2")
    delivery = delivered(tmp_path, mlflow_server)
    assert [run.run for run in delivery.runs] == ["run-1", "run-2"] and server.versions() == []
    (problem,) = delivery.problems
    assert isinstance(problem, IntegrityError)
    (run,) = server.runs("run-1")
    assert run.info.status == "FINISHED" and run.data.tags["dspark.package_absent"] == problem.message
    assert spool_of(tmp_path).folders() == []


def test_a_disk_without_room_is_refused_with_the_bytes_and_nothing_is_lost(
    pristine, tmp_path, mlflow_server, server, monkeypatch
):
    spooled(tmp_path, pristine)
    with monkeypatch.context() as patch:
        patch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(PreflightError, match=r"needs \d+ bytes .*, 1000 are free") as caught:
            delivered(tmp_path, mlflow_server)
        assert "dspark registry sync" in caught.value.hint
    assert server.models() == [] and len(spool_of(tmp_path).folders()) == 1
    delivered(tmp_path, mlflow_server)
    assert_complete(server, tmp_path)
