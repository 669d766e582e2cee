"""Reading a registered version's artifacts, file by file: a folder, an S3 bucket, or through a tracking server.

A store only ever hands out the bytes of a name that it is asked for. What names there are is the manifest's to say.
"""

from __future__ import annotations

import errno
import os
import urllib.parse
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dspark.errors import IntegrityError, PreflightError, ServiceError, SettingsError
from dspark.io.below import open_below
from dspark.registry.lookup import is_server
from dspark.registry.server import AbsentError, FaultError, TrackingServer

_PROXIED = "mlflow-artifacts"
_PATIENCE = 600.0  # a server that proxies S3 fetches a whole file before its first byte comes


class Readable(Protocol):
    """Bytes that come in pieces."""

    def read(self, count: int, /) -> bytes:
        """At most so many of the next bytes; none: it ended."""


class Artifacts(Protocol):
    """A store of files."""

    def open(self, path: str) -> AbstractContextManager[Readable]:
        """Open one file.

        Raises:
            FileNotFoundError: it is not there.
            IntegrityError: a link or something else than a file stands in its place.
            ServiceError: the store cannot be read.
        """


def artifacts_at(address: str, tracking_uri: str) -> Artifacts:
    """The store that a version's artifacts lie in.

    Args:
        address: as the registry gives it: `file:`, `s3:` or `mlflow-artifacts:`.
        tracking_uri: of the registry, which serves artifacts of the last kind.
    Raises:
        SettingsError: a store of another kind, or one that only a tracking server can reach.
        PreflightError: boto3 is not installed, and it is an S3 bucket.
    """
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "" and address.startswith("/"):
        return FolderArtifacts(Path(address))
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FolderArtifacts(Path(urllib.parse.unquote(parts.path)))
    if parts.scheme == "s3":
        return S3Artifacts(parts.netloc, parts.path.strip("/"))
    if parts.scheme == _PROXIED:
        return ProxiedArtifacts(_serving(parts, tracking_uri), parts.path.strip("/"))
    raise SettingsError(
        f"artifacts at {address} cannot be fetched: folders, S3 and tracking servers that serve them are supported",
        "start the tracking server with --serve-artifacts, which makes it hand them out",
    )


class Within:
    """A folder of a store, as a store."""

    def __init__(self, store: Artifacts, folder: str) -> None:
        self._store, self._folder = store, folder

    def open(self, path: str) -> AbstractContextManager[Readable]:
        """See `Artifacts.open`."""
        return self._store.open(f"{self._folder}/{path}")


class FolderArtifacts:
    """A folder, also on a disk that several machines share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def open(self, path: str) -> Iterator[Readable]:
        """See `Artifacts.open`."""
        try:
            with open_below(self._root, path) as handle:
                yield handle
        except FileNotFoundError:
            raise
        except ValueError as reason:
            raise IntegrityError(f"{self._root / path}: {reason}") from None
        except OSError as reason:
            if reason.errno in (errno.ELOOP, errno.ENOTDIR):
                raise IntegrityError(f"{self._root / path}: is a link, or no file") from None
            raise ServiceError(f"{self._root / path}: {reason.strerror}") from None


class ProxiedArtifacts:
    """What a tracking server hands out."""

    def __init__(self, server: TrackingServer, root: str) -> None:
        self._server, self._root = server, root

    @contextmanager
    def open(self, path: str) -> Iterator[Readable]:
        """See `Artifacts.open`."""
        place = f"{self._root}/{path}"
        with ExitStack() as stack:
            try:
                answer = stack.enter_context(self._server.open(f"{_PROXIED}/artifacts/{urllib.parse.quote(place)}"))
            except AbsentError:
                raise FileNotFoundError(path) from None
            except FaultError:
                # Of a file that is not in S3 MLflow says the same as of an S3 that is away; its listing can tell.
                if self._is_listed(place):
                    raise
                raise FileNotFoundError(path) from None
            yield answer

    def _is_listed(self, place: str) -> bool:
        folder, _, name = place.rpartition("/")
        listed = self._server.ask(f"{_PROXIED}/artifacts", {"path": folder}).get("files", [])
        try:
            return any(file["path"] == name for file in listed)
        except (KeyError, TypeError):
            raise self._server.failure(f"it does not say which files are in {folder}") from None


class S3Artifacts:
    """A bucket, with the credentials that boto3 finds and MLflow's own variable for other endpoints than Amazon's."""

    def __init__(self, bucket: str, root: str) -> None:
        if find_spec("boto3") is None:
            raise PreflightError("S3 artifacts are read with boto3", "pip install 'dspark[s3]'")
        import boto3
        from botocore.config import Config

        self._bucket, self._root = bucket, root
        settings = Config(connect_timeout=10, read_timeout=60, retries={"max_attempts": 3, "mode": "standard"})
        endpoint = os.environ.get("MLFLOW_S3_ENDPOINT_URL") or None
        try:
            self._client: Any = boto3.session.Session().client("s3", endpoint_url=endpoint, config=settings)
        except ValueError as reason:
            raise SettingsError(
                f"MLFLOW_S3_ENDPOINT_URL: {reason}", "give one such as https://s3.example.org"
            ) from None

    @contextmanager
    def open(self, path: str) -> Iterator[Readable]:
        """See `Artifacts.open`."""
        from botocore.exceptions import BotoCoreError, ClientError

        key = f"{self._root}/{path}" if self._root else path
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"]
            with body:
                yield body
        except ClientError as reason:
            code = reason.response.get("Error", {}).get("Code", "")
            if code in ("NoSuchKey", "404"):
                raise FileNotFoundError(path) from None
            raise ServiceError(
                f"s3://{self._bucket}/{key}: {reason}", "see the credentials in the environment"
            ) from None
        except BotoCoreError as reason:
            raise ServiceError(
                f"s3://{self._bucket}/{key}: {reason}",
                "see the network and boto3's credentials, then give the same command again: it goes on",
            ) from None


def _serving(parts: urllib.parse.SplitResult, tracking_uri: str) -> TrackingServer:
    """The server that hands out artifacts: the registry's own, credentials go to no other.

    Raises:
        SettingsError: the registry is no server, or names another host.
    """
    if not is_server(tracking_uri):
        raise SettingsError(
            f"artifacts at {parts.geturl()} are handed out by a tracking server; this registry is a database",
            "give the server's address: --tracking-uri https://...",
        )
    if parts.netloc and parts.netloc != urllib.parse.urlsplit(tracking_uri).netloc.rpartition("@")[2]:
        raise SettingsError(
            f"the registry keeps artifacts on another server, {parts.netloc}", f"--tracking-uri https://{parts.netloc}"
        )
    return TrackingServer(tracking_uri, patience=_PATIENCE)
