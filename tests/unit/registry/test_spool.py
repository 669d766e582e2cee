"""What runs have to tell lies on disk, complete and in order, until it was told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dspark.errors import DataError
from dspark.io.jsonfile import read_json
from dspark.registry.events import Ended, Entry, StageEnded
from dspark.registry.spool import Spool, append, read_journal

ENDED = Ended(time=2.0, status="FINISHED", exit_code=0)


def stage(name: str) -> StageEnded:
    return StageEnded(time=1.0, stage=name, key="demo", status="ran", metrics={"seconds": 0.5})


def test_a_journal_is_read_as_it_was_written(tmp_path):
    spool = Spool(tmp_path / "spool")
    folder = spool.begin("run-1", "demo", "dspark run --build demo", [stage("prompts")])
    append(folder, stage("train"))
    append(folder, ENDED)
    journal = read_journal(folder)
    assert [event.kind for event in journal.events] == ["started", "stage", "stage", "ended"]
    assert journal.events[1:] == (stage("prompts"), stage("train"), ENDED)
    assert (journal.started.run, journal.started.build, journal.started.pid) == ("run-1", "demo", os.getpid())
    assert journal.ended == ENDED and journal.packages == ()
    assert read_json(folder / "0002.json")["schema"] == "dspark/event/1"
    assert Entry.model_validate(read_json(folder / "0004.json")).number == 4


def test_journals_come_in_the_order_they_began_whatever_their_names_say(tmp_path):
    """A clock that goes backwards gives later runs earlier names; what was removed leaves no gap that is filled."""
    spool = Spool(tmp_path)
    for name in ("run-c", "run-b", "run-a"):
        append(spool.begin(name, "demo", "c"), ENDED)
    names = lambda: [journal.started.run for journal in spool.journals()[0]]  # noqa: E731
    assert names() == ["run-c", "run-b", "run-a"]
    spool.remove(spool.journals()[0][0])
    spool.begin("run-0", "demo", "c")
    assert names() == ["run-b", "run-a", "run-0"]
    assert len({journal.started.journal for journal in spool.journals()[0]}) == 3


def test_what_a_kill_left_half_done_is_not_read(tmp_path):
    spool = Spool(tmp_path)
    folder = spool.begin("run-1", "demo", "c")
    (folder / ".0002.json.abc.part").write_text('{"half')
    (tmp_path / ".00000002-run-2.part").mkdir()
    (tmp_path / ".delivered-00000001-old").mkdir()
    assert [len(journal.events) for journal in spool.journals()[0]] == [1]
    append(folder, ENDED)
    spool.remove(read_journal(folder))
    assert spool.folders() == [] and not list(tmp_path.glob(".delivered-*"))
    spool.begin("run-3", "demo", "c")
    assert [path.name for path in tmp_path.iterdir()] == ["00000001-run-3"]


@pytest.mark.parametrize("damage", ["gap", "cut", "other version", "unknown key", "no start", "empty"])
def test_a_damaged_journal_is_named_and_does_not_hide_the_others(tmp_path, damage):
    spool = Spool(tmp_path)
    folder = spool.begin("run-1", "demo", "c")
    append(folder, stage("train"))
    append(folder, ENDED)
    whole = spool.begin("run-2", "demo", "c")
    second = folder / "0002.json"
    if damage == "gap":
        second.unlink()
    elif damage == "cut":
        second.write_bytes(second.read_bytes()[:-20])
    elif damage == "other version":
        second.write_text(second.read_text().replace("event/1", "event/2"))
    elif damage == "unknown key":
        second.write_text(second.read_text().replace('"status"', '"state"'))
    elif damage == "no start":
        (folder / "0001.json").write_text(second.read_text().replace('"number": 2', '"number": 1'))
    else:
        for path in folder.glob("*.json"):
            path.unlink()
    journals, broken = spool.journals()
    assert [journal.folder for journal in journals] == [whole]
    (error,) = broken
    assert isinstance(error, DataError) and str(folder) in error.message and "rm -r" in error.hint


def test_only_journals_whose_run_is_dead_are_closed_and_only_once(tmp_path):
    spool = Spool(tmp_path)
    dead, alive, over = (spool.begin(name, "demo", "c") for name in ("dead", "alive", "over"))
    append(over, ENDED)
    under_way = lambda started: started.run == "alive"  # noqa: E731
    assert [journal.started.run for journal in spool.close_orphans(under_way)] == ["dead"]
    assert spool.close_orphans(under_way) == []
    ended = read_journal(dead).ended
    assert ended is not None and (ended.status, ended.exit_code) == ("KILLED", None)
    assert read_journal(alive).ended is None and read_journal(over).ended == ENDED


def test_a_run_that_ends_while_it_is_looked_at_keeps_its_own_end(tmp_path):
    spool = Spool(tmp_path)
    folder = spool.begin("run-1", "demo", "c")

    def under_way(started) -> bool:
        append(folder, ENDED)  # it ends well, just after its journal was read
        return False

    assert spool.close_orphans(under_way) == []
    assert read_journal(folder).ended == ENDED


def test_the_last_package_of_a_build_that_waits(tmp_path):
    from dspark.package.manifest import Digests
    from dspark.registry.events import PackageMade

    def made(build: str, digest: str) -> PackageMade:
        return PackageMade(time=1, build=build, folder="f", package_digest=digest * 64, evidence_digest="0" * 64)

    def digests(package: str, evidence: str = "0") -> Digests:
        return Digests(
            model_digest="1" * 64, package_digest=package * 64, evidence_digest=evidence * 64, self_digest="2" * 64
        )

    spool = Spool(tmp_path)
    assert not spool.awaits("demo", digests("a"))
    spool.begin("run-1", "demo", "c", [ENDED, made("demo", "a")])
    spool.begin("run-2", "demo", "c", [ENDED, made("demo", "b"), made("other", "c")])
    assert not spool.awaits("demo", digests("a"))  # it is to be the candidate again
    assert spool.awaits("demo", digests("b")) and spool.awaits("other", digests("c"))
    assert not spool.awaits("demo", digests("b", "3"))  # measured again
    assert not spool.awaits("third", digests("b"))


KILLED = """
import os, sys, threading, time
from pathlib import Path
from dspark.registry.events import StageEnded
from dspark.registry.spool import Spool, append
folder = Spool(Path(sys.argv[1])).begin("run", "demo", "c")
print("begun", flush=True)
while True:
    append(folder, StageEnded(time=1.0, stage="train", key="k" * 2000, status="ran"))
"""


def test_kill_9_while_writing_leaves_whole_events(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"begun\n"
    while not (tmp_path / "00000001-run" / "0020.json").is_file():
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    (journal,), broken = Spool(tmp_path).journals()
    assert broken == [] and len(journal.events) >= 20
    assert all(event.key == "k" * 2000 for event in journal.events[1:])
