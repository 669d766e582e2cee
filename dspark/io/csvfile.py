"""Tables as CSV, for plots and spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from dspark.io.atomic import write_text


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a header and rows; a cell of None is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *rows])
    write_text(path, text.getvalue())
