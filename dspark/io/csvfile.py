"""Tables as CSV, for plots and spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dspark.errors import DsparkError
from dspark.io.atomic import write_text
from dspark.io.jsonfile import validation_text

Row = TypeVar("Row")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A header and rows; a cell of None is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write `csv_text`, atomically."""
    write_text(path, csv_text(columns, rows))


def read_csv(
    path: Path, columns: Sequence[str], parse: Callable[[dict[str, str]], Row], error: type[DsparkError]
) -> list[Row]:
    """Read the rows of a table that one of our stages wrote.

    Args:
        parse: from cells by column to a row; refuses by pydantic's ValidationError.
        error: what is raised: missing, other columns, or a value that does not parse; names file and line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            reader = csv.DictReader(handle)
            if list(reader.fieldnames or ()) != list(columns):
                raise error(f"{path}:1: columns are {reader.fieldnames}, expected {list(columns)}")
            rows = []
            for number, cells in enumerate(reader, start=2):
                try:
                    rows.append(parse(cells))
                except ValidationError as reason:
                    raise error(f"{path}:{number}: {validation_text(reason)}") from None
            return rows
    except FileNotFoundError:
        raise error(f"{path}: file not found", "make it again with `dspark run`") from None
