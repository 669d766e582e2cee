"""A tracking server made up of a dictionary and a folder: MLflow's answers as a released server gives them.

What a real `mlflow server` answers is tested beside it; this one is quick, and can be told to fail.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/"
REGISTRY = "/api/2.0/mlflow/"


class FakeServer(ThreadingHTTPServer):
    """`versions` is {name: {number: {"uri", "tags"}}}, `aliases` {(name, alias): number}, `root` what it hands out."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.versions: dict[str, dict[str, dict]] = {}
        self.aliases: dict[tuple[str, str], str] = {}
        self.asked: list[str] = []  # paths, in order
        self.headers: list[dict[str, str]] = []
        self.faults: dict[str, object] = {}  # end of a path: a function of the handler, which answers instead
        self.told: list[dict] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def register(self, uri: str, tags: dict[str, str], name="dspark-demo", number="1", alias="production") -> None:
        self.versions.setdefault(name, {})[number] = {"uri": uri, "tags": tags}
        self.aliases[name, alias] = number

    def fetched(self) -> list[str]:
        """Artifacts that were asked for, within the package."""
        return [path.split("/artifacts/package/")[1] for path in self.asked if "/artifacts/package/" in path]

    def handle_error(self, request, client_address) -> None:
        """A client that went away is no fault of the server's."""


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), dict(parse_qsl(parts.query))
        self.server.asked.append(path)
        self.server.headers.append(dict(self.headers))
        for end, fault in self.server.faults.items():
            if path.endswith(end):
                return fault(self)
        if path == ARTIFACTS.rstrip("/"):
            folder = self.server.root / query["path"]
            return self.answer(200, {"files": [{"path": one.name, "is_dir": one.is_dir()} for one in folder.iterdir()]})
        if path.startswith(ARTIFACTS):
            return self._artifact(self.server.root / path.removeprefix(ARTIFACTS))
        return self._registry(path.removeprefix(REGISTRY), query)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.told.append({"path": self.path, **body})
        version = self.server.versions[body["name"]][body["version"]]
        version["tags"][body["key"]] = body["value"]
        self.answer(200, {})

    def _registry(self, path: str, query: dict[str, str]) -> None:
        if path == "model-versions/search":
            return self.answer(200, {"model_versions": self._listed(query["filter"].split("'")[1])})
        name, number = query.get("name", ""), query.get("version")
        if path == "registered-models/alias":
            number = self.server.aliases.get((name, query["alias"]))
            if number is None:
                said = f"Registered model alias {query['alias']} not found."
                return self.answer(400, {"error_code": "INVALID_PARAMETER_VALUE", "message": said})
        found = self.server.versions.get(name, {}).get(number or "")
        if found is None:
            said = f"Model Version (name={name}, version={number}) not found"
            return self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": said})
        if path == "model-versions/get-download-uri":
            return self.answer(200, {"artifact_uri": found["uri"]})
        return self.answer(200, {"model_version": self._version(name, number)})

    def _listed(self, name: str) -> list[dict]:
        return [self._version(name, number) for number in self.server.versions.get(name, {})]

    def _version(self, name: str, number: str) -> dict:
        tags = self.server.versions[name][number]["tags"]
        return {
            "name": name,
            "version": number,
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }

    def _artifact(self, path: Path) -> None:
        if not path.is_file():
            return self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such artifact"})
        return self.send(200, path.read_bytes())

    def answer(self, code: int, value) -> None:
        self.send(code, json.dumps(value).encode())

    def send(self, code: int, data: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        """Nothing on stderr."""


@contextmanager
def serving(root: Path):
    server = FakeServer(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
