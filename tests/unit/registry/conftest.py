from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # fake_server.py, race.py, trap.py
sys.path.insert(0, str(Path(__file__).parents[1] / "package"))  # fake_build.py, resealing.py

import fake_build

from dspark.package.assemble import assemble
from dspark.registry.publish import find_published, publish


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """A package made by the real `assemble`; never changed."""
    root = tmp_path_factory.mktemp("build")
    assemble(fake_build.make(root), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture(scope="session")
def database(tmp_path_factory) -> Path:
    """An empty registry: MLflow takes seconds to make one, copying it takes none."""
    workspace = tmp_path_factory.mktemp("empty workspace")
    assert find_published("demo", "0" * 64, workspace=workspace) is None
    return workspace / "mlflow" / "mlflow.db"


@pytest.fixture(scope="session")
def compared(tmp_path_factory) -> Path:
    """A package that was measured against a champion and a pinned baseline; never changed."""
    root = tmp_path_factory.mktemp("compared")
    assemble(fake_build.make(root, rivals=True), root / "package", card=fake_build.card)
    return root / "package"


@pytest.fixture(scope="session")
def published(tmp_path_factory, pristine, database) -> Path:
    """A workspace with three versions of build `demo` in its registry; copied by those who change it."""
    workspace = tmp_path_factory.mktemp("published")
    (workspace / "mlflow").mkdir()
    shutil.copyfile(database, workspace / "mlflow" / "mlflow.db")
    for steps in (60, 61, 62):
        root = workspace / f"steps {steps}"
        sources = fake_build.make(root)
        cost = sources.costs[fake_build.CPU]
        cost.write_text(cost.read_text().replace("60.0", f"{steps}.0"))
        assemble(sources, root / "package", card=fake_build.card)
        publish(root / "package", workspace=workspace, build="demo", receipts=workspace / "receipts")
    return workspace


@pytest.fixture(scope="session")
def mlflow_server(database, tmp_path_factory) -> Iterator[str]:
    """A real `mlflow server`, and its address. It stores files of new experiments only."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copyfile(database, folder / "mlflow.db")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"host": "127.0.0.1", "port": port, "workers": 1, "backend-store-uri": f"sqlite:///{folder}/mlflow.db"}
    options["artifacts-destination"] = folder / "artifacts"
    command = [sys.executable, "-m", "mlflow", "server", *(f"--{key}={value}" for key, value in options.items())]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # four processes that nothing here asks for anything
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while not _answers(url):
            assert child.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        os.killpg(child.pid, 9)  # its workers too
        child.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True
