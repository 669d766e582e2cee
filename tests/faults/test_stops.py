"""Ctrl-C and SIGTERM in every real stage: the run ends at a safe point, and goes on to the model nobody disturbed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from sandbox import PLACE
from undisturbed import Undisturbed, copy_of, half_files, model_digest, works

from dspark.config.stages import STAGES

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_every_stage_costs_no_model(undisturbed: Undisturbed, tmp_path: Path, number: signal.Signals) -> None:
    """One workspace, stopped in one stage after the other; a stage that was quicker than the signal is finished."""
    sandbox = copy_of(undisturbed.before, tmp_path / PLACE)
    stopped, seconds = [], {}
    for count, stage in enumerate(STAGES):
        events = tmp_path / f"events-{count}.jsonl"
        child = sandbox.start("run", "--target", "tiny", "--no-publish", "--events", str(events))
        while child.poll() is None and not works(events, stage.name):
            time.sleep(0.02)
        child.send_signal(number)
        sent = time.monotonic()
        _, err = child.communicate(timeout=300)
        seconds[stage.name] = round(time.monotonic() - sent, 1)
        assert child.returncode in (130, 0), (stage.name, err)
        assert "Traceback" not in err, (stage.name, err)
        assert sandbox.processes() == {} and half_files(sandbox) == [], stage.name
        if child.returncode == 130:
            stopped.append(stage.name)
            assert sandbox.dspark("status", "--json").json["run"]["state"] == "interrupted"
    print(f"{number.name}: stopped in {stopped}, after {seconds} s")
    assert len(stopped) >= 8, stopped
    done = sandbox.dspark("run", "--target", "tiny", "--json", timeout=900)
    assert done.code == 0, done.err
    assert model_digest(sandbox) == undisturbed.model_digest
    assert sandbox.dspark("doctor").code == 0
