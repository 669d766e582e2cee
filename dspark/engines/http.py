"""HTTP to an engine's server, with the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from dspark.errors import ServiceError, SettingsError


class NobodyThereError(ServiceError):
    """No connection could be made: whatever else would be asked there has no answer either."""


class HttpClient:
    """A server that is asked for JSON.

    Attributes:
        engine: what it is, for messages.
        how_to_start: the hint of its failures.
        address: of the server.

    Args:
        address: such as `http://127.0.0.1:8080`.
        patience: seconds until it must have answered.
    Raises:
        SettingsError: no such address.
    """

    engine: str
    how_to_start: str

    def __init__(self, address: str, *, patience: float = 600.0) -> None:
        try:
            parts = urllib.parse.urlsplit(address)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise SettingsError(f"{address!r} is no address of a server", "give one such as http://127.0.0.1:8080")
        self.address = address.rstrip("/")
        self._patience = patience

    def get(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """What stands at a path; with a body, what it answers to a POST of it.

        Raises:
            ServiceError: the server does not answer, or with an error.
        """
        with self.open(path, body) as answer:
            data: bytes = answer.read()
            return data

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that it answers; with a body, to a POST of it.

        Raises:
            ServiceError: as `get`, or what it answers is no JSON.
        """
        raw = self.get(path, body)
        try:
            return json.loads(raw)
        except ValueError:
            raise self.failure(f"it answered {path} with something else than JSON: {raw[:100]!r}") from None

    def ask_object(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As `ask`, where an object is expected.

        Raises:
            ServiceError: as `ask`, or it is none.
        """
        answer = self.ask(path, body)
        if not isinstance(answer, dict):
            raise self.failure(f"it answered {path} with something else than a JSON object: {str(answer)[:100]!r}")
        return answer

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, each as it arrives.

        Raises:
            ServiceError: as `get`, or the stream breaks off with an error.
        """
        with self.open(path, body) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue  # empty lines between events, and the mark of the end
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise self.failure(f"it broke off: {event['error']}")
                yield event

    @contextlib.contextmanager
    def open(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """What the server answers, to be read inside; whatever goes wrong meanwhile is its failure."""
        data = None if body is None else json.dumps(body).encode("ascii")
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        # An environment's proxy has no business between two processes of one machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self._patience) as answer:
                yield answer
        except urllib.error.HTTPError as reason:
            said = " ".join(reason.read().decode("utf-8", errors="replace").split())
            told = "" if said.startswith("<") else f": {said[:200]}"  # a page for people says nothing here
            raise self.failure(f"it answered {path} with {reason.code}{told}") from None
        except urllib.error.URLError as reason:  # no connection was made
            why = getattr(reason.reason, "strerror", None) or reason.reason
            failure = self.failure(f"it did not answer {path}: {why}")
            raise NobodyThereError(failure.message, failure.hint) from None
        except (OSError, ValueError, http.client.HTTPException) as reason:  # refused, cut off, or no HTTP at all
            raise self.failure(f"it did not answer {path}: {reason}") from None

    def failure(self, what: str) -> ServiceError:
        """The error for what happened."""
        return ServiceError(f"{self.engine} at {self.address}: {what}", self.how_to_start)
