"""A tracking server by MLflow's documented REST API, with the standard library alone.

A serving machine has the light base install without mlflow; all that fetching a package needs of a server is three
questions and plain downloads (MLflow REST API 2.0: registered models, model versions, mlflow-artifacts).
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from dspark.errors import ServiceError, SettingsError

_API = "/api/2.0/"
_MAX_ANSWER = 16 * 2**20
_HINT = "see that the tracking server is up, then give the same command again: what was fetched is kept"
# MLflow's names for what is not there: a model or version, an alias.
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND")


class AbsentError(Exception):
    """The server knows no such thing; says it in its own words."""


class FaultError(ServiceError):
    """The server met a fault of its own (500), or of what it keeps things in."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows none: credentials would travel along to wherever the answer points."""

    @override
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class TrackingServer:
    """A server that is asked with MLflow's own environment variables for its credentials.

    `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`, or `MLFLOW_TRACKING_TOKEN`, or a user in the address;
    `MLFLOW_TRACKING_SERVER_CERT_PATH` names the certificates that it is trusted by.

    Attributes:
        address: without user and password.

    Args:
        address: such as `https://mlflow.example.org`, a path before the API's included.
        patience: seconds without a byte after which it counts as away.
    Raises:
        SettingsError: no such address.
    """

    def __init__(self, address: str, *, patience: float = 60.0) -> None:
        try:
            parts = urllib.parse.urlsplit(address)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise SettingsError(
                "that is no address of a tracking server", "give one such as https://mlflow.example.org"
            )
        host = parts.netloc.rpartition("@")[2]
        self.address = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        self._patience = patience
        self._credentials = _credentials(parts)
        handlers: list[urllib.request.BaseHandler] = [_Redirects()]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_trust()))
        self._opener = urllib.request.build_opener(*handlers)

    def ask(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The JSON object that a GET below `/api/2.0/` answers.

        Raises:
            AbsentError: it knows no such thing.
            ServiceError: it does not answer, or not as a tracking server does.
        """
        with self.open(f"{path}?{urllib.parse.urlencode(query)}") as answer:
            data = answer.read(_MAX_ANSWER + 1)
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict) or len(data) > _MAX_ANSWER:
            raise self.failure(f"it answered {path} with something else than a JSON object")
        return value

    def tell(self, path: str, body: Mapping[str, str]) -> None:
        """POST a JSON object below `/api/2.0/`; failures as of `ask`."""
        with self.open(path, json.dumps(body).encode("ascii")) as answer:
            answer.read(_MAX_ANSWER)

    @contextmanager
    def open(self, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """What the server answers, to be read inside; failures as of `ask`.

        Args:
            path: below `/api/2.0/`, quoted.
            body: of a POST of JSON; None: a GET.
        """
        headers = {"Authorization": self._credentials} if self._credentials else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.address + _API + path, body, headers)
        shown = path.partition("?")[0]
        try:
            with self._opener.open(request, timeout=self._patience) as answer:
                yield answer
        except urllib.error.HTTPError as reason:
            raise self._refusal(shown, reason) from None
        except (OSError, http.client.HTTPException) as reason:  # refused, cut off, or no HTTP at all
            raise self.failure(f"it did not answer {shown}: {reason}") from None

    def failure(self, what: str) -> ServiceError:
        """The error for what happened."""
        return ServiceError(f"MLflow at {self.address}: {what}", _HINT)

    def _refusal(self, path: str, reason: urllib.error.HTTPError) -> Exception:
        said = reason.read(2000).decode("utf-8", errors="replace")
        try:
            told = json.loads(said)
        except ValueError:
            told = None
        code, message = (told.get("error_code"), told.get("message")) if isinstance(told, dict) else (None, None)
        if (reason.code in (400, 404) and code in _ABSENT) or (reason.code == 404 and path.startswith("mlflow-art")):
            return AbsentError(" ".join(str(message or "not found").split())[:300])
        if reason.code in (401, 403):
            return ServiceError(
                f"MLflow at {self.address}: access is refused ({reason.code})",
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            )
        if 300 <= reason.code < 400:
            where = reason.headers.get("Location", "another address")
            return self.failure(f"it points to {where[:200]}, which is not followed: give the address that answers")
        error = self.failure(
            f"it answered {path} with {reason.code} {' '.join(str(message or '').split())[:300]}".strip()
        )
        return FaultError(error.message, error.hint) if reason.code == 500 else error


def _trust() -> ssl.SSLContext:
    """Whose certificates are believed.

    Raises:
        SettingsError: the file that the environment names cannot be read.
    """
    named = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
    try:
        return ssl.create_default_context(cafile=named)
    except OSError as reason:
        raise SettingsError(f"MLFLOW_TRACKING_SERVER_CERT_PATH: {named}: {reason}") from None


def _credentials(parts: urllib.parse.SplitResult) -> str | None:
    """The value of the header `Authorization`, if any."""
    user = urllib.parse.unquote(parts.username or "") or os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = urllib.parse.unquote(parts.password or "") or os.environ.get("MLFLOW_TRACKING_PASSWORD")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if user and password:
        return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
    return f"Bearer {token}" if token else None
