"""Markdown from data: whatever a name or a reason contains, it stays text in its own cell or paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dspark.measured import Measured
from dspark.report.words import interval

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$&])")
_AT_START = re.compile(r"^(?=[#+-])|^(\d+)(?=[.)](?:\s|$))")


def text(value: object) -> str:
    """A value as plain text in one line: no markup, no HTML, no link, no list."""
    line = " ".join("".join(character if character.isprintable() else " " for character in str(value)).split())
    escaped = _AT_START.sub(lambda match: f"{match[1] or ''}\\", _SPECIAL.sub(r"\\\1", line))
    # GitHub makes links of bare addresses.
    return escaped.replace("://", ":\\//").replace("www.", "www\\.").replace("@", "\\@")


def code(value: object) -> str:
    """A value as a code span; characters that could end it or the cell it stands in are shown as spaces."""
    line = "".join(character if character.isprintable() and character not in "`|" else " " for character in str(value))
    return f"`{line.strip() or ' '}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(number: Measured | None, digits: int = 3) -> str:
    """As `words.interval`, which is no link."""
    return interval(number, digits).replace("[", "\\[").replace("]", "\\]")


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1000:.1f} ms"
