"""Runs and the tracking server: no stage speaks to it, and every run shows up once, with how it really ended."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import FakeSandbox

pytestmark = pytest.mark.slow
UNIT = Path(__file__).parents[1] / "unit"
AWAY = "http://127.0.0.1:9"

# Loaded by every Python process that finds it on its path: who asks for a connection or a name, and with which command.
RECORDER = """
import os, sys

def note(line):
    with open(os.environ["CONNECTIONS"], "a") as log:
        log.write(line + " " + " ".join(sys.orig_argv) + "\\n")

def record(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.gethostbyname"):
        note(event)
    if event == "import" and arguments[0] == "mlflow":
        note("mlflow")

sys.addaudithook(record)
note("start")
"""

# A package that verifies: made by `assemble` from made-up outputs, which say which build they are of.
PACKAGE = f"""
import json, os, shutil, sys

from dspark.workspace.stage import stage

sys.path.insert(0, {str(UNIT / "package")!r})


@stage("package")
def main(inputs, paths, progress):
    import fake_build
    from dspark.package.assemble import assemble

    with (paths.root / "calls.log").open("a") as log:
        log.write(f"package@{{paths.key}}\\n")
    sources = fake_build.make(paths.work / "sources")
    sources = sources.__class__(**{{**vars(sources), "build": sources.build.model_copy(update={{"name": paths.key}})}})
    cost = sources.costs[fake_build.CPU]
    cost.write_text(cost.read_text().replace("60.0", os.environ.get("FAKE_COST", "60.0")))
    assemble(sources, paths.out, card=fake_build.card)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def tracked(made: FakeSandbox, tmp_path: Path) -> FakeSandbox:
    """Everything was made but the package, which is a sound one here."""
    (made.root / "stages/assemble_package.py").write_text(PACKAGE)
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder/sitecustomize.py").write_text(RECORDER)
    return made


def run(sandbox: FakeSandbox, *arguments: str, **variables: str):
    return sandbox.dspark("run", "--target", "fake", "--json", *arguments, timeout=300, **variables)


def recorded(sandbox: FakeSandbox, tmp_path: Path) -> dict[str, str]:
    """Variables under which all processes of a command record their connections."""
    kept = sandbox.environment()["PYTHONPATH"]
    return {"PYTHONPATH": f"{tmp_path / 'recorder'}:{kept}", "CONNECTIONS": str(tmp_path / "connections")}


def known(sandbox: FakeSandbox) -> dict[str, tuple[str, str]]:
    """Runs in the workspace's own registry: status and message by id, read from its database."""
    with sqlite3.connect(f"file:{sandbox.root / 'mlflow/mlflow.db'}?mode=ro", uri=True) as connection:
        rows = connection.execute(
            "SELECT t.value, r.status, COALESCE((SELECT value FROM tags m WHERE m.run_uuid = r.run_uuid"
            " AND m.key = 'dspark.message'), '') FROM runs r JOIN tags t USING (run_uuid) WHERE t.key = 'dspark.run'"
        ).fetchall()
        versions = connection.execute("SELECT COUNT(*) FROM model_versions").fetchone()[0]
    connection.close()
    assert len({run for run, _, _ in rows}) == len(rows)
    return {run: (status, message) for run, status, message in rows} | {"versions": (str(versions), "")}


@pytest.mark.long
def test_a_server_that_is_away_for_a_whole_run_is_told_everything_once(tracked: FakeSandbox, tmp_path: Path) -> None:
    """Exit code 8, all kept; no stage opened a connection; then the registry knows the run and its package, once."""
    variables = recorded(tracked, tmp_path)
    away = run(tracked, "--tracking-uri", AWAY, "--set", "responses.max_new_tokens=9", **variables)
    assert away.code == 8, away.err
    assert "builds/fake/package is made and verified, but not registered" in away.err
    assert "dspark registry sync" in away.err and "FINISHED, package" in away.err
    stages = [name.partition("@")[0] for name in tracked.calls()]
    assert {"responses", "train", "package"} <= set(stages)
    lines = (tmp_path / "connections").read_text().splitlines()
    started = [line for line in lines if line.startswith("start ") and "stages/" in line]
    assert len(started) == len(stages)  # every stage was listened to
    asked = [line for line in lines if line.startswith("socket.")]
    assert asked and not [line for line in asked if " stages/" in line or " dvc " in line]
    assert all(" -m dspark run " in line for line in asked)

    doctor = tracked.dspark("doctor", "--json")
    check = next(check for check in doctor.json["checks"] if check["name"] == "tracking")
    assert (check["status"], check["fix"]) == ("warning", "dspark registry sync") and "1 packages" in check["found"]
    synced = tracked.dspark("registry", "sync", "--json")
    assert synced.code == 0, synced.err
    (delivered,) = synced.json["runs"]
    assert (delivered["status"], delivered["registered"]) == ("FINISHED", ["dspark-fake/1"])
    assert known(tracked) == {delivered["run"]: ("FINISHED", ""), "versions": ("1", "")}
    assert tracked.dspark("registry", "sync").out == "nothing was waiting\n"

    noop = run(tracked, "--set", "responses.max_new_tokens=9", **{**variables, "CONNECTIONS": str(tmp_path / "noop")})
    assert noop.code == 0 and noop.json["result"]["version"] == "1", noop.err
    assert not [line for line in (tmp_path / "noop").read_text().splitlines() if not line.startswith("start ")]
    assert len(known(tracked)) == 2 and not list((tracked.root / ".dspark/spool").iterdir())


@pytest.mark.long
def test_runs_show_up_as_they_ended(tracked: FakeSandbox) -> None:
    """A failed one at once; one that SIGTERM stopped and one that kill -9 ended with the next that is delivered."""
    failed = run(tracked, "--set", "responses.max_new_tokens=9", FAKE_FAIL="train")
    assert failed.code == 4 and "no messages" in failed.err, failed.err
    statuses = known(tracked)
    assert next(iter(statuses.values())) == ("FAILED", "stage train@fake: rows.jsonl:3: no messages")
    assert statuses["versions"] == ("0", "")

    slow = {"FAKE_SLOW": "responses", "FAKE_STEPS": "40"}
    for number, blow in ((10, signal.SIGTERM), (11, signal.SIGKILL)):
        (tracked.root / "hold").touch()
        (tracked.root / "steps.log").unlink(missing_ok=True)
        child = tracked.start("run", "--target", "fake", "--set", f"responses.max_new_tokens={number}", **slow)
        steps = tracked.root / "steps.log"
        tracked.wait_for(lambda at=steps: at.is_file() and len(at.read_text().splitlines()) >= 6, child)
        if blow == signal.SIGKILL:
            tracked.kill()
        else:
            child.send_signal(blow)
        child.communicate(timeout=60)
    (tracked.root / "hold").unlink()
    checks = {check["name"]: check for check in tracked.dspark("doctor", "--json").json["checks"]}
    assert "still running for the tracking server" in checks["killed runs"]["found"]
    assert checks["killed runs"]["fix"] == checks["tracking"]["fix"] == "dspark registry sync"

    done = run(tracked, "--set", "responses.max_new_tokens=10")
    assert done.code == 0, done.err
    assert "was killed: noted for the tracking server" in done.err
    statuses = known(tracked)
    assert statuses.pop("versions") == ("1", "")
    assert [status for _, (status, _) in sorted(statuses.items())] == ["FAILED", "KILLED", "KILLED", "FINISHED"]
    assert sorted(statuses)[-1] == done.json["run"]
    assert [message for _, (_, message) in sorted(statuses.items())][1:3] == [
        "stopped",
        "the process was killed",
    ]


def test_an_address_that_cannot_work_is_refused_before_anything_runs(tracked: FakeSandbox) -> None:
    refused = run(tracked, DSPARK_TRACKING_URI="mlruns")
    assert refused.code == 2 and "DSPARK_TRACKING_URI: 'mlruns'" in refused.err
    assert tracked.calls() == []
    assert not (tracked.root / ".dspark/spool").exists()  # all was made with --no-publish
