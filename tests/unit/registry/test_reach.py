"""A server that is away is noticed in the time given, and before mlflow is loaded."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dspark.errors import Interrupted, ServiceError
from dspark.io.progress import Progress
from dspark.registry.reach import AwayError, require_server


@pytest.fixture
def server():
    """Answers with the codes that it is told, one after the other, the last one for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            code = server.codes.pop(0) if len(server.codes) > 1 else server.codes[0]
            server.asked.append(self.path)
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.codes, server.asked = [200], []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def address(server, path: str = "") -> str:
    return f"http://127.0.0.1:{server.server_address[1]}{path}"


@pytest.mark.parametrize("code", [200, 401, 404, 500])
def test_whoever_answers_is_there(server, code):
    server.codes = [code]
    require_server(address(server, "/prefix"), 0.2)
    assert server.asked == ["/prefix/health"]


def test_a_server_that_comes_back_in_time_is_waited_for(server):
    server.codes = [503, 502, 200]
    require_server(address(server), 5)
    assert len(server.asked) == 3


def test_a_proxy_without_its_server_is_away_and_the_reason_is_said(server):
    server.codes = [503]
    with pytest.raises(AwayError, match="503") as caught:
        require_server(address(server).replace("http://", "http://user:secret@"), 0.2)
    assert caught.value.exit_code == ServiceError.exit_code == 8 and "secret" not in caught.value.message


def test_nobody_listens_and_a_listener_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(AwayError, match="timed out"):
            require_server(f"http://127.0.0.1:{port}", 0.5)
        assert time.monotonic() - started < 2
        require_server(f"postgresql://user@127.0.0.1:{port}/mlflow", 0.5)  # a connection is all that is asked of it
    for uri in (f"http://127.0.0.1:{port}", f"postgresql+psycopg2://127.0.0.1:{port}/mlflow"):
        with pytest.raises(AwayError, match="refused"):
            require_server(uri, 0.1)
    require_server("sqlite:////nowhere/mlflow.db", 0)


def test_a_stop_is_obeyed_while_waiting():
    class Stopping(Progress):
        def advance(self, count=1, **fields):
            raise Interrupted("stop")

    with pytest.raises(Interrupted):
        require_server("http://127.0.0.1:9", 5, Stopping())


def test_a_server_that_is_away_costs_no_mlflow():
    code = (
        "import sys\nfrom dspark.registry.tracking import opened\nfrom dspark.registry.reach import AwayError\n"
        "try:\n    with opened('http://127.0.0.1:9', patience_seconds=0.1): pass\n"
        "except AwayError: sys.exit('mlflow' in sys.modules)\nsys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
