"""A PostgreSQL server of this machine's own programs: a fresh cluster on loopback, gone afterwards."""

from __future__ import annotations

import os
import shutil
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
    if _programs() is None:
        return "PostgreSQL's server is not installed: apt-get install postgresql"
    if find_spec("psycopg2") is None:
        return "psycopg2 is not installed: pip install 'dspark[postgres]'"
    return None


@contextmanager
def cluster() -> Iterator[str]:
    """Run a server; yields the address of its databases, to which a name is added."""
    programs = _programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="dspark-postgres-"))
    data = folder / "data"
    data.mkdir()
    as_user: dict[str, str] = {}
    if os.geteuid() == 0:
        for path in (folder, data):
            shutil.chown(path, USER)
        as_user = {"user": USER, "group": USER}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "log").open("wb")
    try:
        _call(
            programs / "initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync", cwd=folder, **as_user
        )
        switches = [part for name, value in _SWITCHES.items() for part in ("-c", f"{name}={value}")]
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(port), *switches],
            cwd=folder,
            stdout=log,
            stderr=log,
            **as_user,
        )
        try:
            _wait(programs, port, server, folder / "log")
            yield f"postgresql+psycopg2://{USER}@127.0.0.1:{port}/"
        finally:
            server.send_signal(2)  # SIGINT: end connections and stop
            server.wait(60)
    finally:
        log.close()
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


def _programs() -> Path | None:
    """The folder of the newest server's programs; Debian keeps them off the path."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def _call(*command: object, **more: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr


def _wait(programs: Path, port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    deadline = time.monotonic() + 60
    while subprocess.run(ready).returncode != 0:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
