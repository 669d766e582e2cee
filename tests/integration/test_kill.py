"""Kills and stops: nothing that was complete is done twice, nothing is left behind, the next run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import FakeSandbox

STEPS = 40
# A change that makes `responses` and what follows run, from a workspace in which all was made.
CHANGE = ("--set", "responses.max_new_tokens=9")
SLOW = {"FAKE_SLOW": "responses", "FAKE_STEPS": str(STEPS)}


def start_slow_run(made: FakeSandbox) -> subprocess.Popen[str]:
    """A run whose `responses` stands at its sixth step, however long the test takes, until `let_go`."""
    (made.root / "hold").touch()
    child = made.start("run", "--target", "fake", "--no-publish", *CHANGE, **SLOW)
    made.wait_for(lambda: len(steps(made)) >= 6, child)
    return child


def let_go(made: FakeSandbox) -> None:
    (made.root / "hold").unlink()


def steps(made: FakeSandbox) -> list[str]:
    log = made.root / "steps.log"
    return log.read_text().splitlines() if log.is_file() else []


def kill_one(made: FakeSandbox, part: str) -> None:
    """SIGKILL to the process of the workspace whose command line holds `part`, the innermost if there are several."""
    matching = [pid for pid, command in made.processes().items() if part in command and " -c " not in command]
    assert matching, made.processes()
    os.kill(max(matching), signal.SIGKILL)


def finish(made: FakeSandbox) -> None:
    """The same command again: it completes, and no step of the killed stage is done twice but the one cut off."""
    let_go(made)
    before = steps(made)
    done = made.run(*CHANGE, **SLOW)
    assert done.code == 0, done.err
    again = steps(made)
    assert again[: len(before)] == before
    assert [line for line in again if again.count(line) > 1] in ([], [before[-1]] * 2)
    assert {line.split()[1] for line in again} == {str(step) for step in range(STEPS)}
    assert (made.root / "builds/fake/package/manifest.json").is_file()


@pytest.mark.parametrize(
    "victim", ["everything", *(pytest.param(one, marks=pytest.mark.long) for one in ("dspark run", "dvc", "stage"))]
)
def test_a_run_goes_on_where_kill_9_ended_it(made: FakeSandbox, victim: str) -> None:
    child = start_slow_run(made)
    if victim == "everything":
        made.kill()
    elif victim == "dspark run":
        child.kill()
    else:
        kill_one(made, {"dvc": "-m dvc", "stage": "generate_responses.py"}[victim])
    child.wait(timeout=60)
    assert child.returncode != 0
    if victim == "stage":
        assert child.stderr is not None
        assert "responses@fake: it ended without a result: it was killed" in child.stderr.read()
    made.calls()
    finish(made)
    called = made.calls()
    assert "prompts@fake" not in called
    made.wait_for(lambda: made.processes() == {})


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
    ],
)
def test_a_stop_reaches_everything_and_leaves_resumable_state(made: FakeSandbox, number: signal.Signals) -> None:
    child = start_slow_run(made)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "stopping at the next safe point" in err
    assert "responses@fake: interrupted" in err
    assert made.processes() == {}
    standing = made.dspark("status", "--json").json
    assert standing["run"]["state"] == "interrupted"
    assert standing["run"]["exit_code"] == 130
    if number == signal.SIGINT:
        finish(made)


def test_a_second_run_is_refused_and_status_shows_the_first(made: FakeSandbox) -> None:
    child = start_slow_run(made)
    refused = made.run()
    assert refused.code == 3
    assert f"in use: dspark run of build 'fake' (process {child.pid})" in refused.err
    assert "dspark status" in refused.err
    standing = made.dspark("status", "--json").json
    assert (standing["run"]["state"], standing["running"]) == ("running", "responses@fake")
    assert standing["progress"]["total"] == STEPS
    text = made.dspark("status").out
    assert "responses@fake" in text and f"/{STEPS} steps" in text
    assert made.dspark("plan", "--target", "fake").code == 3
    let_go(made)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err


def test_a_killed_run_is_called_killed(made: FakeSandbox) -> None:
    child = start_slow_run(made)
    made.kill()
    child.wait()
    standing = made.dspark("status")
    assert "killed" in standing.out and f"dspark run --build fake {' '.join(CHANGE)}" in standing.out
    checks = {check["name"]: check for check in made.dspark("doctor", "--json").json["checks"]}
    assert checks["last run"]["status"] == "warning"
    assert "can be resumed" in checks["unfinished work"]["found"]
    mended = made.dspark("doctor", "--fix")
    assert "mended: marked the killed run" in mended.out
    assert made.dspark("status", "--json").json["run"]["state"] == "failed"


def test_what_a_killed_dvc_leaves_is_mended_by_the_next_run(made: FakeSandbox) -> None:
    table = made.root / ".dvc/tmp/rwlock"
    table.write_text("")
    lock = made.root / "dvc.lock"
    lock.write_bytes(lock.read_bytes()[:200])
    doctor = made.dspark("doctor", "--json")
    assert doctor.code == 3
    broken = {check["name"] for check in doctor.json["checks"] if check["status"] == "error"}
    assert broken == {"dvc file locks", "dvc.lock"}
    done = made.run()
    assert done.code == 0, done.err
    assert "removed file locks of a killed DVC, which it had left unreadable" in done.err
    assert "restored dvc.lock" in done.err
    assert made.calls() == []
    assert made.dspark("doctor").code == 0
