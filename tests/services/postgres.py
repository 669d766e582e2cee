"""A PostgreSQL server of this machine's own programs: a fresh cluster on loopback, gone afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

USER = "postgres"  # the server refuses to run as root, and Debian's package makes this user
_SWITCHES = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "50"}


def missing() -> str | None:
    """What must be installed first, or None."""
    if programs() is None:
        return "PostgreSQL's server is not installed: apt-get install postgresql"
    if find_spec("psycopg2") is None:
        return "psycopg2 is not installed: pip install 'dspark[postgres]'"
    return None


class Cluster:
    """A server that can go away and come back with what it holds.

    Attributes:
        address: of its databases, to which a name is added.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._port = _free_port()
        self._user: dict[str, str] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self.address = f"postgresql+psycopg2://{USER}@127.0.0.1:{self._port}/"

    def make(self) -> None:
        data = self._folder / "data"
        data.mkdir()
        if os.geteuid() == 0:
            for path in (self._folder, data):
                shutil.chown(path, USER)
            self._user = {"user": USER, "group": USER}
        options = ("-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync")
        _call(self._programs / "initdb", "-D", data, *options, cwd=self._folder, **self._user)

    def start(self) -> None:
        switches = [part for name, value in _SWITCHES.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", "-p", str(self._port), *switches],
                cwd=self._folder,
                stdout=log,
                stderr=log,
                **self._user,  # type: ignore[call-overload]
            )
        ready = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        deadline = time.monotonic() + 60
        while subprocess.run(ready).returncode != 0:
            waits = self._server.poll() is None and time.monotonic() < deadline
            assert waits, (self._folder / "log").read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)  # ends connections and stops
            self._server.wait(60)
            self._server = None


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Run a server."""
    found = programs()
    assert found is not None
    folder = Path(tempfile.mkdtemp(prefix="dspark-postgres-"))
    made = Cluster(found, folder)
    try:
        made.make()
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def database(address: str, name: str) -> Iterator[str]:
    """An empty database in a running server; yields its address."""
    import psycopg2

    connection = psycopg2.connect(f"{address.replace('+psycopg2', '')}postgres")
    connection.autocommit = True
    try:
        connection.cursor().execute(f'CREATE DATABASE "{name}"')
    finally:
        connection.close()
    yield f"{address}{name}"


def programs() -> Path | None:
    """The folder of the newest server's programs; Debian keeps them off the path."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _call(*command: object, **more: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
