"""Open a registry that others use at the same time: alone only while it may be created."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dspark.errors import PreflightError
from dspark.io.progress import Progress
from dspark.registry.lock import locked
from dspark.registry.receipts import sqlite_file
from dspark.registry.tracking import Registry, opened


@contextmanager
def connected(uri: str, *, workspace: Path, progress: Progress | None = None) -> Iterator[Registry]:
    """Open a registry in which something was published.

    Opening may create the schema of a database, which two processes must not do at once, so it happens under the
    registry's lock; what follows does not, and stands whatever others do meanwhile.

    Args:
        uri: the registry's address.
        workspace: its lock is taken.
        progress: reported to while waiting for the lock.
    Raises:
        PreflightError: a SQLite registry that is not there; it would be made empty otherwise.
        ServiceError: whatever mlflow could not do, with its reason.
    """
    database = sqlite_file(uri)
    if database is not None and not database.is_file():
        hint = "publish a package first: dspark run --target NAME"
        raise PreflightError(f"{database}: there is no registry yet", hint)
    with ExitStack() as stack:
        with locked(workspace / "mlflow" / ".lock", progress or Progress()):
            registry = stack.enter_context(opened(uri))
        yield registry
