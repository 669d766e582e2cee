"""One process at a time, and a dead one holds nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from dspark.errors import Interrupted, ServiceError
from dspark.io.progress import Progress
from dspark.registry.lock import locked

HOLD = """
import sys, time
from pathlib import Path
from dspark.io.progress import Progress
from dspark.registry.lock import locked
with locked(Path(sys.argv[1]), Progress()):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_holder_waits_until_the_first_is_dead(tmp_path):
    path = tmp_path / "deep" / ".lock"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ServiceError, match="another process"), locked(path, Progress(), timeout_seconds=0.2):
            raise AssertionError("two holders")
        other.kill()
        other.wait()
        started = time.monotonic()
        with locked(path, Progress(), timeout_seconds=5):
            assert time.monotonic() - started < 4
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


def test_a_stop_is_obeyed_while_waiting(tmp_path):
    class Stopping(Progress):
        def advance(self, count=1, **fields):
            raise Interrupted("stop")

    with locked(tmp_path / "l", Progress()), pytest.raises(Interrupted), locked(tmp_path / "l", Stopping()):
        raise AssertionError("two holders")


def test_the_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "l", Progress()):
        raise KeyError
    with locked(tmp_path / "l", Progress(), timeout_seconds=0):
        pass
