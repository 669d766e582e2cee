"""Is a tracking server there? Asked before mlflow is loaded, which would take minutes to give up."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from dspark.errors import ServiceError
from dspark.io.progress import Progress

PATIENCE_SECONDS = 10.0
_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_DOWN_BEHIND_A_PROXY = (502, 503, 504)


class AwayError(ServiceError):
    """A server that does not answer now; the same may succeed later."""


def require_server(uri: str, patience_seconds: float = PATIENCE_SECONDS, progress: Progress | None = None) -> None:
    """Return as soon as the server of a tracking address answers; at once for a database file.

    Args:
        uri: the address.
        patience_seconds: for how long to ask again; a server that is being restarted is worth a moment.
        progress: reported to between attempts.
    Raises:
        AwayError: it did not answer for that long, with the last reason.
        Interrupted: a stop was requested.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        left = deadline - time.monotonic()
        reason = _silence(uri, max(0.1, min(_ATTEMPT_SECONDS, left)))
        if reason is None:
            return
        if time.monotonic() + _PAUSE_SECONDS >= deadline:
            raise AwayError(
                f"the tracking server {shown(uri)} does not answer: {reason}",
                "see that it is up and can be reached from here, then give the command again",
            )
        (progress or Progress()).advance(0)
        time.sleep(_PAUSE_SECONDS)


def shown(address: str) -> str:
    """An address as messages, receipts and reports hold it: without its password."""
    try:
        parts = urlsplit(address)
        if parts.password is None:
            return address
    except ValueError:
        return address
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}").geturl()


def _silence(uri: str, timeout_seconds: float) -> str | None:
    """Why the server does not answer, or None if it does."""
    parts = urlsplit(uri)
    scheme = parts.scheme.partition("+")[0]
    try:
        if scheme in ("http", "https"):
            return _no_answer(uri, timeout_seconds)
        if parts.hostname and scheme in _PORTS:
            socket.create_connection((parts.hostname, parts.port or _PORTS[scheme]), timeout_seconds).close()
    except OSError as reason:
        return str(reason)
    return None


def _no_answer(uri: str, timeout_seconds: float) -> str | None:
    parts = urlsplit(uri)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    try:
        urllib.request.urlopen(f"{bare}/health", timeout=timeout_seconds).close()  # http(s) alone
    except urllib.error.HTTPError as answer:
        # Whoever refuses to tell its health is there.
        return f"{answer.code} {answer.reason}" if answer.code in _DOWN_BEHIND_A_PROXY else None
    except urllib.error.URLError as reason:
        if isinstance(reason.reason, ssl.SSLError):
            return None  # there; mlflow has its own settings for certificates, and says what is wrong with them
        return str(reason.reason)
    except http.client.HTTPException as reason:
        return f"not HTTP: {reason!r}"
    return None
