"""What a report tells, before anybody decides how it looks. Every text is plain: whoever renders it escapes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.report.chart import Figure
from dspark.report.verdict import Verdict


@dataclass(frozen=True)
class Code:
    """A command, a digest, a path: to be copied as it is."""

    text: str


Cell = str | Code


@dataclass(frozen=True)
class Paragraph:
    """A sentence or a few."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for."""

    pairs: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True)
class Table:
    """Rows under a header; numbers stand there with their interval and n.

    Attributes:
        title: what the rows are, shown and read out.
        note: what one must know to read it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure; its numbers stand beside it as a table."""

    figure: Figure


@dataclass(frozen=True)
class Missing:
    """Something that a reader would look for here and that is not there."""

    what: str
    reason: str


Plain = Paragraph | Items | Facts | Table | Chart | Missing


@dataclass(frozen=True)
class Group:
    """Blocks under a heading of their own.

    Attributes:
        folded: shown when it is asked for.
    """

    title: str
    blocks: tuple[Plain, ...]
    folded: bool = False


Block = Plain | Group


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        anchor: what links point at: lower-case letters and hyphens.
    """

    anchor: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Step:
    """What to do next."""

    why: str
    command: str


@dataclass(frozen=True)
class Page:
    """The report.

    Attributes:
        title: of the build or package.
        subtitle: what it is, in a sentence.
        verdict: whether it is worth deploying.
        steps: what to do next.
        facts: where the package lies, and its digests.
        sections: in their order.
        absent: everything that could not be read or was not measured, by name, with the reason.
    """

    title: str
    subtitle: str
    verdict: Verdict
    steps: tuple[Step, ...]
    facts: Facts
    sections: tuple[Section, ...]
    absent: dict[str, str] = field(default_factory=dict)
