"""JSON lines: one strict JSON object per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dspark.errors import DataError
from dspark.io.atomic import atomic_path
from dspark.io.jsonfile import canonical_json, strict_loads


def read_jsonlines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that dspark itself wrote.

    Raises:
        DataError: with file and line number. (Users' prompt files go through `corpus`, which rejects rows instead.)
    """
    try:
        handle = path.open("rb")
    except FileNotFoundError:
        raise DataError(f"{path}: file not found", "make it again with `dspark run`") from None
    with handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                yield strict_loads(line.decode("utf-8"))
            except ValueError as reason:
                raise DataError(
                    f"{path}:{number}: not valid JSON: {reason}", "make it again with `dspark run`"
                ) from None


def write_jsonlines(path: Path, rows: Iterable[Any]) -> int:
    """Write rows atomically, one canonical JSON object per line.

    Returns:
        the number of rows.
    """
    count = 0
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as handle:
        for row in rows:
            handle.write(canonical_json(row) + "\n")
            count += 1
    return count
