"""A disk that fills in the middle of a real run, stage after stage: it is said, and with room the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from undisturbed import Undisturbed, copy_of, half_files, model_digest

pytestmark = pytest.mark.faults
MEGABYTE = 1024**2


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Path]:
    """A file system of 900 MiB, which takes no more than what is written to it of the real disk."""
    image, folder = tmp_path / "disk.img", tmp_path / "small disk"
    image.touch()
    os.truncate(image, 900 * MEGABYTE)
    folder.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_in_any_stage_is_named_and_costs_no_model(undisturbed: Undisturbed, loopback: Path) -> None:
    sandbox = copy_of(undisturbed.before, loopback / "wörk späce")
    filler = loopback / "filler"
    failed = []
    for count, stage in enumerate(("prompts", "responses", "features", "train", "evaluate", "export", "package")):
        events = loopback.parent / f"events-{count}.jsonl"
        child = sandbox.start("run", "--target", "tiny", "--no-publish", "--events", str(events))
        while child.poll() is None and not begun(events, stage):
            time.sleep(0.02)
        fill(filler)
        _, err = child.communicate(timeout=600)
        filler.unlink()
        assert child.returncode in (0, 3, 5), (stage, err)
        assert "Traceback" not in err and "fault in dspark" not in err, (stage, err)
        if child.returncode:
            failed.append(stage)
            assert "No space left on device" in err or "no result" in err, (stage, err)
        assert sandbox.processes() == {} and half_files(sandbox) == [], stage
    assert len(failed) >= 5, failed
    done = sandbox.dspark("run", "--target", "tiny", "--no-publish", "--json", timeout=900)
    assert done.code == 0, done.err
    assert model_digest(sandbox) == undisturbed.model_digest
    assert sandbox.dspark("doctor").code == 0


def begun(events: Path, stage: str) -> bool:
    if not events.is_file():
        return False
    rows = [json.loads(line) for line in events.read_text(encoding="utf-8").split("\n")[:-1]]
    return any(str(row.get("stage", "")).startswith(f"{stage}@") for row in rows)


def fill(path: Path) -> None:
    """Take all that is left of a file system, without writing it."""
    with path.open("wb") as handle:
        size = MEGABYTE * 256
        while size >= 512:
            try:
                os.posix_fallocate(handle.fileno(), handle.seek(0, os.SEEK_END), size)
                os.fsync(handle.fileno())
            except OSError:
                size //= 2
