"""Faults are injected into the real stages on the tiny target; `make test-faults` runs these, `make test` does not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # undisturbed.py

from undisturbed import Undisturbed, copy_of, model_digest  # isort: skip
from sandbox import make_sandbox  # isort: skip


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """One whole run of the tiny build."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fresh = make_sandbox(folder / "before")
    fetched = fresh.dspark("targets", "fetch", "tiny")
    assert fetched.code == 0, fetched.err
    run = copy_of(fresh.root, folder / "after")
    started = time.monotonic()
    done = run.dspark("run", "--target", "tiny", "--json", timeout=900)
    assert done.code == 0, done.err
    return Undisturbed(fresh.root, model_digest(run), time.monotonic() - started)
