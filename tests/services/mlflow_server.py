"""`mlflow server` on loopback, as a production host would start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def free_port() -> int:
    with socket.socket() as endpoint:
        endpoint.bind(("127.0.0.1", 0))
        return int(endpoint.getsockname()[1])


@contextmanager
def mlflow_server(folder: Path, *options: str) -> Iterator[str]:
    """Run a server with these options; yields its address.

    Args:
        folder: its current folder, and its log's.
    """
    port = free_port()
    place = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *place, *options],
            cwd=folder,
            env=os.environ | _QUIET,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _ready(f"http://127.0.0.1:{port}", process, folder / "log")
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # its workers too
            process.wait(timeout=60)


def _ready(address: str, process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(1200):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1):
                return address
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())
