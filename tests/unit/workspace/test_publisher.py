"""What a run writes down for the tracking server, and what it does before and without one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py

import fake_build

from dspark.errors import DataError, Interrupted
from dspark.io.jsonfile import write_json, write_model
from dspark.package.assemble import assemble
from dspark.package.verify import read_manifest, verify
from dspark.registry.delivery import waiting_copy
from dspark.registry.events import Ended, StageEnded
from dspark.registry.publish import package_to_publish, spool_of
from dspark.registry.reach import AwayError
from dspark.workspace import doctor, publisher
from dspark.workspace.journal import RunJournal, orphans
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import Outcome, Silent
from dspark.workspace.lock import run_lock
from dspark.workspace.publisher import Publisher
from dspark.workspace.results import RunRecord, StageResult, result_path

AWAY = "http://127.0.0.1:9"


class Heard(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def stage_started(self, name: str) -> None:
        self.told.append(f"started {name}")

    def stage_ended(self, outcome: Outcome) -> None:
        self.told.append(f"{outcome.status} {outcome.name}")

    def note(self, message: str) -> None:
        self.told.append(message)


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setattr(publisher, "PATIENCE_SECONDS", 0.1)
    found = Workspace(tmp_path)
    (found.runs / "run-1").mkdir(parents=True)
    return found


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def journal(workspace, heard) -> RunJournal:
    return begin(workspace, heard)


def begin(workspace: Workspace, heard: Heard) -> RunJournal:
    record = RunRecord(id="run-1", build="demo", pid=os.getpid(), started=1.0, flags=["training.steps=5"])
    return Publisher(workspace, AWAY, heard).begin(workspace.runs / "run-1", record)


def events(workspace: Workspace):
    journals, broken = spool_of(workspace.root).journals()
    assert broken == []
    return [journal.events for journal in journals]


def test_a_run_that_changes_nothing_writes_nothing(workspace, journal, heard):
    for stage in ("prompts", "train"):
        journal.stage_ended(Outcome(f"{stage}@demo", "up to date"))
    journal.note("a line")
    assert journal.end("FINISHED", 0)
    assert not journal.begun and events(workspace) == []
    assert heard.told == ["up to date prompts@demo", "up to date train@demo", "a line"]


def test_the_journal_begins_with_the_first_change_and_holds_what_came_before_it(workspace, journal, heard):
    run = workspace.runs / "run-1"
    write_json(workspace.dag, {"builds": {"demo": {"target": "t", "corpus": "c"}}})
    write_json(workspace.build("demo") / "train/metrics.json", {"loss": 0.25, "steps": 5, "schema": "s", "list": [1]})
    journal.stage_ended(Outcome("prompts@demo", "up to date"))
    journal.stage_started("train@demo")
    assert [event.kind for event in events(workspace)[0]] == ["started", "stage"]
    journal.stage_ended(Outcome("train@demo", "ran", 2.5))
    write_model(
        result_path(run, "calibrate", "demo"),
        StageResult(stage="calibrate", key="demo", status="failed", seconds=1.0, category="DataError"),
    )
    journal.stage_ended(Outcome("calibrate@demo", "failed", 1.0, message="no records", exit_code=4))
    assert journal.end("FAILED", 4, "stage calibrate@demo: no records")
    assert not journal.end("FINISHED", 0)  # the first word counts
    started, prompts, train, calibrate, ended = events(workspace)[0]
    assert (started.run, started.command) == ("run-1", "dspark run --build demo --set training.steps=5")
    assert (prompts.status, prompts.metrics) == ("up to date", {})
    assert train.metrics == {"loss": 0.25, "steps": 5.0, "seconds": 2.5}
    assert (calibrate.category, calibrate.message, calibrate.metrics) == ("DataError", "no records", {"seconds": 1.0})
    assert (ended.status, ended.exit_code) == ("FAILED", 4)
    assert heard.told[-1] == "failed calibrate@demo"


def test_a_stop_is_written_down_and_nobody_is_asked(workspace, journal, heard, monkeypatch):
    monkeypatch.setattr(publisher, "deliver", lambda *_, **__: pytest.fail("a run that was stopped shall stop"))
    journal.stage_started("train@demo")
    Publisher(workspace, AWAY, heard).failed(journal, Interrupted("stopped"))
    assert events(workspace)[0][-1].status == "KILLED" and events(workspace)[0][-1].exit_code == 130


def test_a_failure_is_told_at_once_and_kept_with_a_word_if_nobody_listens(workspace, journal, heard):
    journal.stage_started("train@demo")
    Publisher(workspace, AWAY, heard).failed(journal, DataError("no rows"))
    assert events(workspace)[0][-1].status == "FAILED"
    assert "does not answer" in heard.told[-1] and "run run-1 of build demo, FAILED" in heard.told[-1]


def test_a_failure_before_anything_changed_is_no_run(workspace, journal, heard):
    Publisher(workspace, AWAY, heard).failed(journal, DataError("no rows"))
    assert events(workspace) == [] and heard.told == []


@pytest.fixture
def package(workspace) -> Path:
    folder = workspace.build("demo") / "package"
    assemble(fake_build.make(workspace.root / "sources"), folder, card=fake_build.card)
    return folder


def test_publishing_spools_end_and_package_before_it_asks_and_says_what_waits(workspace, package, journal, heard):
    digest = read_manifest(package).digests.package_digest
    journal.stage_started("train@demo")
    for _ in range(2):  # the second time by another run, which finds everything made
        with pytest.raises(AwayError, match=r"builds/demo/package is made and verified, but not registered") as caught:
            Publisher(workspace, AWAY, heard).publish("demo", journal)
        assert caught.value.exit_code == 8 and digest[:12] in caught.value.hint
        (found,) = events(workspace)
        assert [event.kind for event in found] == ["started", "ended", "package"]
        assert (found[2].folder, found[2].package_digest) == ("builds/demo/package", digest)
        journal = begin(workspace, heard)


def test_a_damaged_package_is_no_finished_run(workspace, package, journal, heard):
    from dspark.errors import IntegrityError

    (package / "README.md").write_bytes(b"changed")
    journal.stage_started("package@demo")
    with pytest.raises(IntegrityError) as caught:
        Publisher(workspace, AWAY, heard).publish("demo", journal)
    Publisher(workspace, AWAY, heard).failed(journal, caught.value)
    assert [event.kind for event in events(workspace)[0]] == ["started", "ended"]
    assert events(workspace)[0][-1].status == "FAILED"


def test_a_package_that_waits_is_copied_before_another_can_take_its_place(workspace, package, heard):
    manifest = read_manifest(package)
    digest = manifest.digests.package_digest
    ended = Ended(time=1.0, status="FINISHED", exit_code=0)
    made = package_to_publish(package, manifest, workspace.root)
    spool_of(workspace.root).begin("run-0", "demo", "c", [ended, made])
    copy = waiting_copy(workspace.root, made)
    (copy.parent / f".{copy.name}.part").mkdir(parents=True)  # a kill in the middle of an earlier copy
    for _ in range(2):
        begin(workspace, heard)
        assert verify(copy, digest=digest).build == "demo"
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def belongs_to_nobody(folder: Path) -> None:
    """Let a journal be that of a process which is gone."""
    first = folder / "0001.json"
    value = json.loads(first.read_text())
    value["event"]["pid"] = 999_999_999
    first.write_text(json.dumps(value))


def test_orphans_are_runs_whose_process_is_gone_and_a_run_or_doctor_closes_them(workspace, heard):
    spool = spool_of(workspace.root)
    folder = spool.begin("run-0", "demo", "c", [StageEnded(time=1.0, stage="train", key="demo", status="ran")])
    with run_lock(workspace, "dspark run", heard.note):  # this process holds the workspace: the run is under way
        assert orphans(workspace, spool) == []
    assert [found.started.run for found in orphans(workspace, spool)] == ["run-0"]
    belongs_to_nobody(folder)
    with run_lock(workspace, "dspark run", heard.note):  # another run is; this one was killed
        assert [found.started.run for found in orphans(workspace, spool)] == ["run-0"]
        checks = {check.name: check for check in doctor._tracking(workspace)}
        assert "run-0" in checks["killed runs"].found and checks["killed runs"].fix == "dspark registry sync"
        begin(workspace, heard)
    assert heard.told == ["run run-0 was killed: noted for the tracking server"]
    (check,) = doctor._tracking(workspace)
    assert (check.status, check.fix) == ("warning", "dspark registry sync")
    assert "3 events of 1 runs and 0 packages" in check.found
    (folder / "0002.json").write_text("{")
    (check,) = doctor._tracking(workspace)
    assert check.status == "error" and "0002.json" in check.found


def test_doctor_repairs_what_a_kill_left(workspace):
    belongs_to_nobody(spool_of(workspace.root).begin("run-0", "demo", "c"))
    assert doctor._repair(workspace)[-1:] == ["noted for the tracking server that run run-0 was killed"]
    assert doctor._repair(workspace) == []
