"""A report as one HTML file that needs nothing else: no network, no inline code but its own, everything escaped.

The content security policy allows exactly this style and this script, by their digests. Without a script everything
shows: charts, legends, tables; the script adds values under the pointer, arrow keys, series that come and go.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from dspark.report.drawing import render, sample
from dspark.report.looks import style
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
    Section,
    Table,
)
from dspark.report.svg import escaped

_HERE = Path(__file__).parent
_EMPTY = {"meta", "link"}  # elements without an end
_LONG = 36  # characters from which on a cell is broken into lines


def render_html(page: Page) -> str:
    """The whole report; equal pages give equal bytes."""
    return _Document(page).text()


def policy(styles: str, script: str) -> str:
    """The content security policy of a page with one style and one script in it."""
    return (
        f"default-src 'none'; style-src '{_digest(styles)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"


def _tag(name: str, attributes: Mapping[str, str | None] | None = None, *children: str) -> str:
    """An element; attributes that are None are left out, empty ones stand without a value."""
    parts = [name]
    for key, value in (attributes or {}).items():
        if value is not None:
            parts.append(f'{key}="{escaped(value)}"' if value else key)
    opening = f"<{' '.join(parts)}>"
    return opening if name in _EMPTY else f"{opening}{''.join(children)}</{name}>"


def _text(name: str, text: str, css: str | None = None) -> str:
    return _tag(name, {"class": css}, escaped(text))


class _Document:
    """Builds the file; ids are numbered, so that no two are the same whatever names contain."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._numbers = count(1)

    def text(self) -> str:
        page = self.page
        styles = style() + "\n" + (_HERE / "page.css").read_text(encoding="utf-8")
        script = (_HERE / "page.js").read_text(encoding="utf-8")
        head = (
            _tag("meta", {"charset": "utf-8"}),
            _tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy(styles, script)}),
            _tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            _tag("meta", {"name": "color-scheme", "content": "light dark"}),
            _tag("meta", {"name": "referrer", "content": "no-referrer"}),
            _text("title", f"{page.title}: {page.verdict.headline}"),
            _tag("link", {"rel": "icon", "href": "data:,"}),  # or browsers ask the server for one
            f"<style>{styles}</style>",
        )
        body = (
            _tag("a", {"class": "skip", "href": "#content"}, "To the content"),
            _tag("header", None, _text("h1", page.title), _text("p", page.subtitle, "subtitle")),
            self._navigation(),
            _tag("main", {"id": "content"}, self._verdict(), *map(self._section, page.sections)),
            _tag("div", {"id": "tip", "role": "status", "hidden": ""}),
            f"<script>{script}</script>",
        )
        lines = [
            _tag("head", None, "\n", *(f"{part}\n" for part in head)),
            _tag("body", None, "\n", *(f"{part}\n" for part in body)),
        ]
        return "<!doctype html>\n" + _tag("html", {"lang": "en"}, "\n", *(f"{line}\n" for line in lines)) + "\n"

    def _navigation(self) -> str:
        links = (("verdict", "Verdict"), *((section.anchor, section.title) for section in self.page.sections))
        items = (_tag("li", None, _tag("a", {"href": f"#{anchor}"}, escaped(title))) for anchor, title in links)
        return _tag("nav", {"aria-label": "Parts of the report"}, _tag("ul", None, *items))

    def _verdict(self) -> str:
        page = self.page
        told = page.verdict
        steps = (
            _tag("li", None, _text("span", f"{step.why}:"), _tag("pre", {"tabindex": "0"}, _text("code", step.command)))
            for step in page.steps
        )
        return _tag(
            "section",
            {"id": "verdict", "class": f"verdict {told.answer.replace(' ', '-')}", "aria-labelledby": "headline"},
            _tag("h2", {"id": "headline"}, escaped(f"{told.headline}.")),
            _tag("ul", None, *(_text("li", line) for line in told.lines)),
            _text("h3", "Next"),
            _tag("ol", {"class": "steps"}, *steps),
            *self._block(page.facts),
            _tag(
                "p",
                {"class": "hint", "hidden": ""},
                "Point at a mark for its values, or focus a chart and use the arrow keys.",
            ),
        )

    def _section(self, section: Section) -> str:
        heading = f"{section.anchor}-title"
        parts = (part for block in section.blocks for part in self._block(block))
        title = _tag("h2", {"id": heading}, escaped(section.title))
        return _tag("section", {"id": section.anchor, "aria-labelledby": heading}, title, "\n", *parts) + "\n"

    def _block(self, block: Block) -> Iterator[str]:
        match block:
            case Group():
                inner = [part for one in block.blocks for part in self._block(one)]
                if block.folded:
                    yield _tag("details", {"class": "group"}, _text("summary", block.title), *inner)
                else:
                    yield _tag("div", {"class": "group"}, _text("h3", block.title), *inner)
            case Paragraph():
                yield _text("p", block.text)
            case Items():
                yield _tag("ul", None, *(_text("li", item) for item in block.items))
            case Facts():
                pairs = (_text("dt", name) + _tag("dd", None, _cell(cell)) for name, cell in block.pairs)
                yield _tag("dl", None, *pairs)
            case Missing():
                what = _text("strong", f"Not there: {block.what}.")
                yield _tag("p", {"class": "missing"}, what, " ", escaped(block.reason))
            case Table():
                yield self._table(block.title, block.header, block.rows)
                if block.note:
                    yield _text("p", block.note, "note")
            case Chart():
                yield self._chart(block)

    def _table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
        name = f"table-{next(self._numbers)}"
        head = _tag("tr", None, *(_tag("th", {"scope": "col"}, escaped(cell)) for cell in header))
        body = (_tag("tr", None, *(_tag("td", {"class": _kind(cell)}, _cell(cell)) for cell in row)) for row in rows)
        table = _tag(
            "table",
            None,
            _tag("caption", {"id": name}, escaped(title)),
            _tag("thead", None, head),
            _tag("tbody", None, *(f"{row}\n" for row in body)),
        )
        # What is wider than the page scrolls inside of it; the keyboard can do that where it can be focused.
        return _tag("div", {"class": "scroll", "role": "region", "tabindex": "0", "aria-labelledby": name}, table)

    def _chart(self, chart: Chart) -> str:
        figure = chart.figure
        name = f"figure-{next(self._numbers)}"
        names = figure.names
        keys = (
            _tag(
                "button",
                {"type": "button", "data-series": str(place), "aria-pressed": "true", "disabled": ""},
                sample(figure, one),
                _text("span", one),
            )
            for place, one in enumerate(names)
        )
        header, rows = point_rows(figure)
        return _tag(
            "figure",
            {"class": "chart", "id": name, "aria-labelledby": f"{name}-title"},
            _tag("h3", {"id": f"{name}-title"}, escaped(figure.title)),
            _text("figcaption", figure.caption),
            *(
                [_tag("div", {"class": "legend", "role": "group", "aria-label": "Series"}, *keys)]
                if len(names) > 1
                else []
            ),
            _tag("div", {"class": "wide"}, render(figure, ids=f"{name}-wide", bare=True)),
            _tag("div", {"class": "narrow"}, render(figure, ids=f"{name}-narrow", bare=True, narrow=True)),
            _tag(
                "details",
                None,
                _text("summary", "The numbers as a table"),
                self._table(figure.title, header, rows),
            ),
        )


def _cell(cell: Cell) -> str:
    return _text("code", cell.text) if isinstance(cell, Code) else escaped(cell)


def _kind(cell: Cell) -> str | None:
    """How a cell is broken: numbers with their interval never, long texts into lines of a certain width."""
    text = cell.text if isinstance(cell, Code) else cell
    if len(text) > _LONG:
        return "long"
    return "number" if text[:1] in "+-–[0123456789" else None
