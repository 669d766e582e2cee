"""Stands in front of a tracking server and dies when it is told to."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Death = Literal["before", "half", "after"]


class FlakyProxy:
    """Passes calls on until the one at which the server is to die; from then on nobody answers, until `revive`.

    Attributes:
        calls: `METHOD path` of everything that was to change something, in order.
        url: what the client talks to.
    """

    def __init__(self, upstream: str) -> None:
        self.calls: list[str] = []
        self.url = ""
        self.dead = False
        self.dies_in_upload: int | None = None  # half way through the n-th file
        self._upstream = urlsplit(upstream)
        self._dies: tuple[int, Death] | None = None
        self._lock = threading.Lock()

    def die_at(self, call: int, how: Death) -> None:
        """Die at the n-th change from now on (0: the next).

        Args:
            how: `before` the server hears of it, `half` way through its body, or `after` the server did it, so that
                only the answer is lost.
        """
        self.calls, self.dead, self._dies = [], False, (call, how)

    def revive(self) -> None:
        self.calls, self.dead, self._dies = [], False, None

    def _fate(self, method: str, path: str) -> Death | None:
        changes = method not in ("GET", "HEAD") and not path.endswith("/search")
        with self._lock:
            if self.dead:
                return "before"
            if not changes:
                return None
            self.calls.append(f"{method} {path}")
            uploads = sum(call.startswith("PUT ") for call in self.calls)
            if method == "PUT" and self.dies_in_upload is not None and uploads > self.dies_in_upload:
                self.dead = True
                return "half"
            if self._dies is None or len(self.calls) <= self._dies[0]:
                return None
            self.dead = True
            return self._dies[1]

    @contextmanager
    def serving(self) -> Iterator[FlakyProxy]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                path = urlsplit(self.path).path.removeprefix("/api/2.0").removeprefix("/mlflow")
                fate = proxy._fate(self.command, path)
                self.close_connection = proxy.dead
                if fate == "before":
                    self.connection.close()
                    return
                body = self._body()
                if path == "/health":
                    self.send_response(200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if fate == "half":
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        proxy._begin(self, len(body)).send(body[: len(body) // 2])
                    self.connection.close()
                    return
                connection = proxy._begin(self, len(body))
                connection.send(body)
                answer = connection.getresponse()
                data = answer.read()
                connection.close()
                if fate == "after":
                    self.connection.close()
                    return
                self.send_response(answer.status)
                for key, value in answer.getheaders():
                    if key.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                        self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding", "") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def _begin(self, handler: BaseHTTPRequestHandler, length: int) -> http.client.HTTPConnection:
        assert self._upstream.hostname and self._upstream.port
        connection = http.client.HTTPConnection(self._upstream.hostname, self._upstream.port, timeout=60)
        connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
        for key, value in handler.headers.items():
            if key.lower() not in ("transfer-encoding", "content-length", "connection"):
                connection.putheader(key, value)
        connection.putheader("Content-Length", str(length))
        connection.endheaders()
        return connection
