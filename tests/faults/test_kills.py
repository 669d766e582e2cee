"""kill -9 at a random moment of `dspark run`, of one process or of all: the same command ends as if nothing was."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sandbox import PLACE
from undisturbed import Undisturbed, copy_of, half_files, model_digest, rows_of, works

from dspark.config.stages import STAGES

if TYPE_CHECKING:
    from sandbox import Sandbox

pytestmark = pytest.mark.faults
KILLS = int(os.environ.get("DSPARK_KILLS", "50"))
# Which processes of the workspace, by their command lines.
VICTIMS: dict[str, Callable[[str], bool]] = {
    "all": lambda command: True,
    "run": lambda command: "-m dspark run" in command,
    "dvc": lambda command: "-m dvc" in command,
    "stage": lambda command: "stages/" in command and " -c " not in command,
}


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_run_completes_to_the_same_model(undisturbed: Undisturbed, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    sandbox = copy_of(undisturbed.before, tmp_path / PLACE)
    victim, moment = draw.choice(sorted(VICTIMS)), draw.uniform(0, undisturbed.seconds)
    child = sandbox.start("run", "--target", "tiny", "--json")
    time.sleep(moment)
    killed = kill(sandbox, VICTIMS[victim])
    child.communicate(timeout=900)  # what was killed leaves no one who works on
    sandbox.wait_for(lambda: sandbox.processes() == {}, seconds=60)
    seen = set(finished_stages(sandbox))

    done = sandbox.dspark("run", "--target", "tiny", "--json", timeout=900)
    described = f"seed {seed}: {victim} at {moment:.1f} s, {killed} processes"
    assert done.code == 0, f"{described}\n{done.err}"
    assert model_digest(sandbox) == undisturbed.model_digest, described
    again = {stage["name"] for stage in done.json["stages"] if stage["status"] == "ran"}
    assert not seen & again, f"{described}: done twice"
    assert sandbox.processes() == {}, described
    assert half_files(sandbox) == [], described
    listed = sandbox.dspark("registry", "show", "dspark-tiny", "--json")
    assert len(listed.json["versions"]) == 1, described
    assert sandbox.dspark("doctor").code == 0, described


def test_kill_9_in_every_stage_costs_no_model(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """One workspace, killed in one stage after the other: what was finished is never done again."""
    sandbox = copy_of(undisturbed.before, tmp_path / PLACE)
    killed: list[str] = []
    for count, stage in enumerate(STAGES):
        events = tmp_path / f"events-{count}.jsonl"
        before = set(finished_stages(sandbox))
        child = sandbox.start("run", "--target", "tiny", "--no-publish", "--events", str(events))
        while child.poll() is None and not works(events, stage.name):
            time.sleep(0.02)
        if kill(sandbox, VICTIMS["all"]):
            killed.append(stage.name)
        child.communicate(timeout=60)
        sandbox.wait_for(lambda: sandbox.processes() == {}, seconds=60)
        assert not before & ran(events), f"in {stage.name}: done twice"
    print(f"killed in {killed}")
    assert {"responses", "features", "train", "package"} <= set(killed)
    done = sandbox.dspark("run", "--target", "tiny", "--json", timeout=900)
    assert done.code == 0, done.err
    assert model_digest(sandbox) == undisturbed.model_digest
    assert half_files(sandbox) == [] and sandbox.dspark("doctor").code == 0


def ran(events: Path) -> set[str]:
    """Stages that began to work in a run."""
    return {str(row["stage"]) for row in rows_of(events) if row["event"] in ("start", "progress")}


def kill(sandbox: Sandbox, chosen: Callable[[str], bool]) -> int:
    count = 0
    for pid, command in sandbox.processes().items():
        if chosen(command):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                count += 1
    return count


def finished_stages(sandbox: Sandbox) -> list[str]:
    """Stages that DVC has recorded: none of them may run again."""
    from dspark.io.yamlfile import read_yaml

    lock = sandbox.root / "dvc.lock"
    kept = sandbox.root / ".dspark/dvc.lock.last"
    for path in (lock, kept):
        with contextlib.suppress(Exception):  # a lock file that was cut off is restored by the next run
            return list(read_yaml(path)["stages"])
    return []
