"""Two runs at once, a store that cannot be written, a stop in every stage, prompts that nobody should write."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "corpus"))  # malformed.py

from dspark.config.stages import STAGES

if TYPE_CHECKING:
    from conftest import FakeSandbox
    from sandbox import Sandbox

pytestmark = pytest.mark.long
STEPS = 8


def test_of_two_runs_that_begin_at_once_one_works_and_one_is_refused(made: FakeSandbox) -> None:
    made.write_script("package", "changed")
    runs = [made.start("run", "--target", "fake", "--no-publish") for _ in range(2)]
    said = [child.communicate(timeout=120)[1] for child in runs]
    assert sorted(child.returncode for child in runs) == [0, 3], said
    refused = next(text for child, text in zip(runs, said, strict=True) if child.returncode == 3)
    winner = next(child.pid for child in runs if child.returncode == 0)
    assert f"in use: dspark run of build 'fake' (process {winner})" in refused
    assert made.calls() == ["package@fake"]
    assert made.dspark("doctor").code == 0


@pytest.fixture
def read_only(made: FakeSandbox):
    """Mounts the store of a workspace in which everything was made so that nobody can write to it, root included."""
    store = made.root / ".dspark/store"
    try:
        subprocess.run(["mount", "--bind", str(store), str(store)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(store)], check=True)
    yield store
    subprocess.run(["umount", "--lazy", str(store)], check=True)


def test_a_store_that_is_read_only_serves_what_it_holds_and_says_what_it_cannot_take(
    made: FakeSandbox, read_only: Path
) -> None:
    assert made.ran() == []
    made.edit("params.yaml", lambda text: text.replace("steps: 100", "steps: 101"))
    assert "features" not in made.ran()  # which the store holds
    made.edit("pipeline/domains/rows.jsonl", lambda text: text + text.replace("hello", "more"))
    done = made.run()
    assert done.code == 3 and "Traceback" not in done.err
    assert f"Error: stage features@fake: {read_only}" in done.err and "Read-only file system" in done.err
    assert "mount it for writing" in done.err


def test_a_stop_in_any_stage_is_gone_on_from(fake: FakeSandbox) -> None:
    """SIGINT and SIGTERM by turns, in one stage after the other, in whatever order DVC runs them."""
    slow = {"FAKE_SLOW": "any", "FAKE_STEPS": str(STEPS)}
    stopped: list[str] = []
    while len(stopped) < len(STAGES):
        (fake.root / "hold").write_text(" ".join(stopped))  # those go on; the next one stands at its sixth step
        child = fake.start("run", "--target", "fake", "--no-publish", **slow)
        fake.wait_for(lambda: bool(held(fake) - set(stopped)), child)
        (stage,) = held(fake) - set(stopped)
        child.send_signal((signal.SIGINT, signal.SIGTERM)[len(stopped) % 2])
        _, err = child.communicate(timeout=60)
        assert child.returncode == 130, (stage, err)
        assert fake.processes() == {}, stage
        standing = fake.dspark("status", "--json").json
        assert standing["run"]["state"] == "interrupted", stage
        stopped.append(stage)
    (fake.root / "hold").unlink()
    done = fake.run(**slow)
    assert done.code == 0, done.err
    for spec in STAGES:  # every step was done, the one that was cut off perhaps twice
        mine = [line.split()[1] for line in lines(fake) if line.startswith(f"{spec.name} ")]
        assert {*mine} == {str(step) for step in range(STEPS)} and len(mine) <= STEPS + 1, spec.name
    calls = fake.calls()
    assert len(calls) == 2 * len(STAGES) and {calls.count(name) for name in calls} == {2}  # stopped, then finished


def held(fake: FakeSandbox) -> set[str]:
    """Stages that came to their sixth step."""
    return {line.split()[0] for line in lines(fake) if line.endswith(" 5")}


def lines(fake: FakeSandbox) -> list[str]:
    log = fake.root / "steps.log"
    return log.read_text().splitlines() if log.is_file() else []


def test_ten_thousand_malformed_rows_go_through_the_real_stage(sandbox: Sandbox, tmp_path: Path) -> None:
    """By the command line, with the target's own tokenizer and template; the run is stopped after that stage."""
    from malformed import malformed_rows

    rows = malformed_rows(10_000, seed=7)
    (sandbox.root / "pipeline/domains/fuzz.jsonl").write_bytes(b"\n".join(row.line for row in rows))
    (sandbox.root / "pipeline/domains/fuzz.yaml").write_text("source: {kind: jsonl, path: fuzz.jsonl}\n")
    sandbox.edit("params.yaml", lambda text: text.replace("domains: [math, code, chat]", "domains: [fuzz]"))
    events = tmp_path / "events.jsonl"
    child = sandbox.start("run", "--target", "tiny", "--no-publish", "--events", str(events))
    ended = '"stage_ended", "stage": "prompts@tiny"'
    sandbox.wait_for(lambda: events.is_file() and ended in events.read_text(encoding="utf-8"), child, seconds=300)
    assert not [path for path in sandbox.root.glob(".dspark/runs/*/*.log") if "Traceback" in path.read_text("utf-8")]
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130 and "Traceback" not in err, err
    summary = json.loads((sandbox.root / "corpora/tiny/prompts/summary.json").read_text(encoding="utf-8"))
    assert summary["input"] == summary["kept"] + summary["rejected"] == 10_000
    reasons = summary["domains"]["fuzz"]["rejected_by_reason"]
    assert reasons.keys() >= {"characters", "content", "encoding", "id", "json", "role", "shape", "too-long"}
