"""Where a workspace's own registry believes its files to lie: MLflow keeps absolute addresses.

dspark finds the packages of a workspace that was moved (`lookup`, `tracking`); MLflow's own pages and tools do not.
Reads the database itself, without mlflow, which takes seconds to load.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dspark.errors import IntegrityError
from dspark.registry.receipts import default_uri, sqlite_file


def left_behind(workspace: Path) -> list[Path]:
    """Folders outside the workspace, and gone, in which its registry believes artifacts to lie; without duplicates.

    Args:
        workspace: its folder.
    Raises:
        IntegrityError: the database cannot be read.
    """
    database = sqlite_file(default_uri(workspace))
    if database is None or not database.is_file():
        return []
    wanted = "SELECT DISTINCT artifact_location FROM experiments WHERE name = 'dspark' OR name LIKE 'dspark-%'"
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=1)) as connection:
            addresses = [str(row[0]) for row in connection.execute(wanted)]
    except sqlite3.OperationalError:
        return []  # somebody writes, or it is of another version: nothing to complain of
    except sqlite3.DatabaseError as reason:
        raise IntegrityError(
            f"{database}: the registry's database is damaged: {reason}",
            f"restore it from a backup, or move it away and `dspark run` registers what is here anew: "
            f"mv {database} {database}.damaged",
        ) from None
    places = [Path(unquote(urlsplit(address).path)) for address in addresses if address.startswith(("file:", "/"))]
    return sorted({place for place in places if place != database.parent / "artifacts" and not place.exists()})
