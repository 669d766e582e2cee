"""One package, one version, whatever happens on the way; and what is registered is what was verified."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fake_build
import numpy as np
import pytest
from race import exit_code, forked

from dspark.errors import GateError, IntegrityError, Interrupted, PreflightError, ServiceError, SettingsError
from dspark.io.progress import Progress
from dspark.package.assemble import assemble
from dspark.package.verify import read_manifest, verify
from dspark.registry import delivery
from dspark.registry.location import left_behind
from dspark.registry.publish import find_published, publish, spool_of
from dspark.registry.receipts import default_uri, receipt_path


@pytest.fixture
def workspace(tmp_path, database) -> Path:
    """A workspace whose path needs quoting, with an empty registry."""
    folder = tmp_path / "work space ü"
    (folder / "mlflow").mkdir(parents=True)
    shutil.copyfile(database, folder / "mlflow" / "mlflow.db")
    return folder


def send(pristine, workspace, **more):
    return publish(pristine, workspace=workspace, build="demo", receipts=workspace / "receipts", **more)


def client(workspace):
    import mlflow

    return mlflow.MlflowClient(default_uri(workspace), default_uri(workspace))


def versions(workspace):
    return client(workspace).search_model_versions("name = 'dspark-demo'")


def statuses(workspace):
    connection = client(workspace)
    experiments = [item.experiment_id for item in connection.search_experiments()]
    return sorted(run.info.status for run in connection.search_runs(experiments))


def artifacts(workspace) -> list[Path]:
    return [path for path in (workspace / "mlflow" / "artifacts").rglob("*") if path.is_file()]


def test_a_published_package_is_the_candidate_and_can_be_asked_for_lengths(pristine, workspace):
    manifest = read_manifest(pristine)
    receipt = send(pristine, workspace, stages=[{"stage": "train", "status": "ran", "seconds": 2.0}])
    assert (receipt.model_name, receipt.version) == ("dspark-demo", "1")
    assert receipt.package_digest == manifest.digests.package_digest

    found = client(workspace).get_model_version_by_alias("dspark-demo", "candidate")
    assert found.version == receipt.version or str(found.version) == receipt.version
    assert found.tags["dspark.package_digest"] == receipt.package_digest
    run = client(workspace).get_run(receipt.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["recipe.training.steps"] == "5"
    assert run.data.metrics["evaluate.temperatures.0.domains.math.tau.ci95_low"] == pytest.approx(1.9)
    assert run.data.tags["dspark.git_dirty"] == "true"
    history = client(workspace).get_metric_history(receipt.run_id, "train.loss")
    assert [(point.step, point.value) for point in history] == [(1, 3.5), (2, 3.25)]

    # What lies in the registry is the package, byte for byte, and nothing pickled.
    names = [path.name for path in artifacts(workspace)]
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".pt", ".bin", ".joblib"))]
    assert "pyfunc_model.py" in names
    (copy,) = (workspace / "mlflow" / "artifacts").rglob("manifest.json")
    assert verify(copy.parent, digest=manifest.digests.self_digest).authenticated == "everything"

    # Worked out by hand with T = (1.5, 1.25, 1): survival .998 .996 .0001 and .209 .144 .105. The additive cost is the
    # closer one: 11 ms for two requests up to four tokens, then 1.5 ms each. Two bonus tokens and the two sure drafts
    # come to 3.99 / 0.011 = 363 tokens/s; with the next likely one it would be 4.20 / 0.0125 = 336.
    import mlflow

    mlflow.set_tracking_uri(default_uri(workspace))
    try:
        model = mlflow.pyfunc.load_model("models:/dspark-demo@candidate")
        logits = np.array([[9.0, 8.0, -9.0], [-2.0, 1.0, 1.0]], np.float32)
        for temperature in (0.0, 1.0):
            lengths = model.predict(logits, params={"temperature": temperature})
            assert lengths.dtype == np.int64 and lengths.tolist() == [2, 0]
        assert model.predict(logits, params={"profile": fake_build.CPU}).tolist() == [2, 0]
        with pytest.raises(SettingsError, match="nowhere"):
            model.predict(logits, params={"profile": "nowhere"})
    finally:
        mlflow.set_tracking_uri(None)


def test_publishing_again_registers_nothing_new(pristine, workspace, monkeypatch):
    first = send(pristine, workspace)

    def forbidden(*_):
        raise AssertionError("a receipt is enough")

    with monkeypatch.context() as patch:
        patch.setattr(delivery, "opened", forbidden)
        assert send(pristine, workspace) == first
    receipt_path(workspace / "receipts", "demo").unlink()
    assert send(pristine, workspace) == first  # the registry itself knows it
    assert len(versions(workspace)) == 1 and statuses(workspace) == ["FINISHED"]
    assert find_published("demo", first.package_digest, workspace=workspace) == first
    assert find_published("demo", "0" * 64, workspace=workspace) is None


def test_a_no_op_loads_no_mlflow(pristine, workspace):
    send(pristine, workspace)
    code = (
        "import sys; from pathlib import Path; from dspark.registry.publish import publish; w = Path(sys.argv[2]);"
        "publish(Path(sys.argv[1]), workspace=w, build='demo', receipts=w / 'receipts');"
        "sys.exit(any(name in sys.modules for name in ('mlflow', 'torch', 'sqlalchemy')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(pristine), str(workspace)]).returncode == 0


def test_going_back_to_an_earlier_package_moves_the_alias_and_adds_no_version(pristine, workspace, tmp_path):
    first = send(pristine, workspace)
    sources = fake_build.make(tmp_path / "other")
    cost = sources.costs[fake_build.CPU]
    cost.write_text(cost.read_text().replace("60.0", "61.0"))
    assemble(sources, tmp_path / "other" / "package", card=fake_build.card)
    second = send(tmp_path / "other" / "package", workspace)
    assert second.version == "2"
    assert send(pristine, workspace) == first
    assert len(versions(workspace)) == 2
    assert str(client(workspace).get_model_version_by_alias("dspark-demo", "candidate").version) == "1"


def test_a_package_that_was_measured_again_is_another_version_with_its_new_evidence(pristine, compared, workspace):
    first, second = send(pristine, workspace), send(compared, workspace)
    assert first.package_digest == second.package_digest and first.evidence_digest != second.evidence_digest
    assert (first.version, second.version) == ("1", "2")
    assert send(compared, workspace) == second and len(versions(workspace)) == 2
    assert find_published("demo", first.package_digest, workspace=workspace) == second  # the newest evidence
    assert str(client(workspace).get_model_version_by_alias("dspark-demo", "candidate").version) == "2"


class StopsAt(Progress):
    """Raises at its n-th safe point."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.left, self.error = step, error

    def advance(self, count: int = 1, **fields) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize(
    ("step", "error"),
    [*((step, Interrupted("stop")) for step in range(1, 6)), (2, KeyError("fault")), (4, KeyError("fault"))],
)
def test_stopped_or_failed_anywhere_then_done_again_gives_one_version(pristine, workspace, step, error):
    """Safe points: the run has ended, model logged, records logged, version made, all told."""
    with pytest.raises(type(error)):
        send(pristine, workspace, progress=StopsAt(step, error))
    assert statuses(workspace) == ["FINISHED"]  # of the work; registering its package is what is left
    receipt = send(pristine, workspace)
    assert [str(item.version) for item in versions(workspace)] == ["1"] == [receipt.version]
    assert str(client(workspace).get_model_version_by_alias("dspark-demo", "candidate").version) == "1"
    assert statuses(workspace) == ["FINISHED"] and spool_of(workspace).folders() == []
    history = client(workspace).get_metric_history(receipt.run_id, "train.loss")
    assert [(point.step, point.value) for point in history] == [(1, 3.5), (2, 3.25)]
    # Models that were logged and never registered are gone again: one copy of the package.
    assert len([path for path in artifacts(workspace) if path.name == "manifest.json"]) == 1


class KilledAt(Progress):
    """kill -9 at its n-th safe point."""

    def __init__(self, step: int) -> None:
        self.left = step

    def advance(self, count: int = 1, **fields) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", [3, 4])
def test_killed_with_nobody_to_clean_up_then_done_again(pristine, workspace, step):
    """kill -9 before and after the version exists."""
    child = forked(lambda: send(pristine, workspace, progress=KilledAt(step)))
    assert exit_code(child) == -signal.SIGKILL
    assert len(versions(workspace)) == (0 if step == 3 else 1)
    send(pristine, workspace)
    assert len(versions(workspace)) == 1 and statuses(workspace) == ["FINISHED"]


def test_two_processes_that_publish_at_once_register_one_version(pristine, workspace):
    def work(name: str) -> None:
        publish(pristine, workspace=workspace, build="demo", receipts=workspace / name)

    children = [forked(lambda name=name: work(name)) for name in ("r1", "r2")]
    assert [exit_code(child) for child in children] == [0, 0]
    assert len(versions(workspace)) == 1 and statuses(workspace) == ["FINISHED"]
    receipts = [(workspace / name / "demo.json").read_text() for name in ("r1", "r2")]
    assert receipts[0] == receipts[1]


def test_a_registry_is_made_where_there_is_none(pristine, database):
    """The fixture's registry was made from nothing by `find_published`; its experiment keeps artifacts beside it."""
    import mlflow

    found = mlflow.MlflowClient(f"sqlite:///{database}").get_experiment_by_name("dspark")
    assert found.artifact_location == (database.parent / "artifacts").as_uri()
    assert left_behind(database.parents[1]) == []


def test_a_moved_workspace_keeps_its_new_artifacts_with_it(pristine, workspace, tmp_path):
    """The copied database says that artifacts lie in the folder it was copied from; nothing is written there."""
    send(pristine, workspace)
    moved = tmp_path / "moved"
    shutil.move(workspace, moved)
    (moved / "receipts" / "demo.json").unlink()
    sources = fake_build.make(tmp_path / "other")
    cost = sources.costs[fake_build.CPU]
    cost.write_text(cost.read_text().replace("60.0", "61.0"))
    assemble(sources, tmp_path / "other" / "package", card=fake_build.card)
    receipt = send(tmp_path / "other" / "package", moved)
    assert receipt.version == "2" and not workspace.exists()
    assert workspace / "mlflow" / "artifacts" in left_behind(moved)  # which `dspark doctor` tells
    assert len([path for path in artifacts(moved) if path.name == "manifest.json"]) == 2


def test_an_experiment_that_was_deleted_is_restored(pristine, workspace):
    send(pristine, workspace)
    receipt_path(workspace / "receipts", "demo").unlink()
    connection = client(workspace)
    for item in connection.search_experiments(filter_string="name LIKE 'dspark%'"):
        connection.delete_experiment(item.experiment_id)
    assert send(pristine, workspace).version == "1"


def test_a_damaged_package_or_one_of_another_build_is_not_published(pristine, workspace, tmp_path):
    folder = Path(shutil.copytree(pristine, tmp_path / "p"))
    (folder / "README.md").write_bytes(b"changed")
    with pytest.raises(IntegrityError):
        send(folder, workspace)
    with pytest.raises(GateError, match="demo"):
        publish(pristine, workspace=workspace, build="other", receipts=workspace / "receipts")
    assert versions(workspace) == []


def test_addresses_that_cannot_work_are_errors_with_a_next_step(pristine, workspace, tmp_path):
    with pytest.raises(SettingsError, match="current folder"):
        send(pristine, workspace, tracking_uri="sqlite:///mlflow.db")
    blocked = tmp_path / "blocked.db"
    blocked.write_bytes(b"this is not a database, it is a text of some length" * 40)
    with pytest.raises(ServiceError) as caught:
        send(pristine, workspace, tracking_uri=f"sqlite:///{blocked}")
    assert caught.value.exit_code == 8 and caught.value.hint


def test_the_callers_tracking_address_is_left_as_it_was(pristine, workspace):
    import mlflow

    before = os.environ.get("MLFLOW_TRACKING_URI")
    assert not mlflow.is_tracking_uri_set()
    find_published("demo", "0" * 64, workspace=workspace)
    assert not mlflow.is_tracking_uri_set() and os.environ.get("MLFLOW_TRACKING_URI") == before


def test_a_database_that_cannot_grow_is_told_in_two_lines_and_nothing_is_lost(pristine, workspace, capfd):
    """SQLite raises its own SQLITE_FULL where it may have no further page, as on a full disk."""
    import sqlalchemy

    def full(connection, _):
        connection.execute("PRAGMA max_page_count = 1")  # which SQLite takes for: as many as there are

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", full)
    try:
        with pytest.raises(PreflightError) as caught:
            send(pristine, workspace)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "connect", full)
    assert caught.value.message.endswith("(sqlite3.OperationalError) database or disk is full")
    assert caught.value.hint.startswith("make room") and "dspark registry sync" in caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    told = capfd.readouterr()
    assert told.out + told.err == ""
    assert len(spool_of(workspace).folders()) == 1


def test_telemetry_is_off(pristine, workspace):
    find_published("demo", "0" * 64, workspace=workspace)
    from mlflow.telemetry.utils import is_telemetry_disabled

    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert is_telemetry_disabled()
