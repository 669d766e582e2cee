"""A report as Markdown, for the summary of a CI job: the same texts and numbers, charts as their tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dspark.report import markdown
from dspark.report.page.figures import point_rows
from dspark.report.page.model import (
    Block,
    Cell,
    Chart,
    Code,
    Facts,
    Group,
    Items,
    Missing,
    Page,
    Paragraph,
    Table,
)
from dspark.report.svg import escaped


def render_markdown(page: Page) -> str:
    """The whole report; whatever a name or a reason contains, it stays text."""
    lines = [
        f"# {markdown.text(page.title)}",
        markdown.text(page.subtitle),
        f"**{markdown.text(page.verdict.headline)}.**",
        _list(page.verdict.lines),
        *(f"Next, {markdown.text(step.why)}:\n\n{_command(step.command)}" for step in page.steps),
        *_block(page.facts),
    ]
    for section in page.sections:
        lines.append(f"## {markdown.text(section.title)}")
        for block in section.blocks:
            lines += _block(block)
    return "\n\n".join(line for line in lines if line) + "\n"


def _block(block: Block) -> Iterator[str]:
    match block:
        case Group():
            inner = [line for part in block.blocks for line in _block(part)]
            if block.folded:
                yield _folded(block.title, inner)
            else:
                yield f"### {markdown.text(block.title)}"
                yield from inner
        case Paragraph():
            yield markdown.text(block.text)
        case Items():
            yield _list(block.items)
        case Facts():
            yield "\n".join(f"- {markdown.text(name)}: {_cell(cell)}" for name, cell in block.pairs)
        case Missing():
            yield f"- not there: {markdown.text(block.what)} ({markdown.text(block.reason)})"
        case Table():
            yield f"**{markdown.text(block.title)}**"
            yield _table(block.header, block.rows)
            if block.note:
                yield markdown.text(block.note)
        case Chart():
            header, rows = point_rows(block.figure)
            yield _folded(block.figure.title, [markdown.text(block.figure.caption), _table(header, rows)])


def _table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    return markdown.table([markdown.text(cell) for cell in header], [[_cell(cell) for cell in row] for row in rows])


def _cell(cell: Cell) -> str:
    return markdown.code(cell.text) if isinstance(cell, Code) else markdown.text(cell)


def _list(items: Sequence[str]) -> str:
    return "\n".join(f"- {markdown.text(item)}" for item in items)


def _command(command: str) -> str:
    """A command as a block of its own, indented: no text of it can end a fence."""
    return "\n".join(f"    {line}" for line in command.splitlines())


def _folded(title: str, lines: Sequence[str]) -> str:
    """Lines that unfold; their title stands in HTML, where Markdown's escapes mean nothing."""
    inner = "\n\n".join(lines)
    return f"<details><summary>{escaped(title)}</summary>\n\n{inner}\n\n</details>"
