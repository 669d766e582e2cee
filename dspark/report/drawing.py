"""A figure as SVG that needs nothing else: small multiples, intervals, one legend.

Series are told apart by shape and dash as well as by colour; of those that coincide the later one leaves the earlier
one visible. The figure has a background of its own and follows the
reader's light or dark mode; every mark says its values when pointed at, and the description tells how every series
runs. All styles hang on the class `dspark-plot`, so that a page can hold several figures and restyle them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dspark.report.chart import AREAS, NARROW, Axis, Figure, Panel, Point, Series
from dspark.report.looks import FONT, OVER, Looks, looks_of, style
from dspark.report.svg import Attribute, element, escaped, number, shortened, text_width, wrapped

_EDGE, _TITLE, _SMALL, _NOTE, _LINE = 16, 15, 11, 9, 15


def render(figure: Figure, *, ids: str = "dspark", bare: bool = False, narrow: bool = False) -> str:
    """The figure as an SVG document of one root element; equal figures give equal bytes.

    Args:
        ids: what its ids begin with; a page that holds figures of one name gives each its own.
        bare: without what a page says beside it: title, caption, legend (`sample`), rules (`looks.style`).
        narrow: panels below each other, legible where a page is 360 pixels wide.
    """
    return _Drawing(figure, f"{ids}-{figure.name}", bare=bare, narrow=narrow).document()


def sample(figure: Figure, name: str) -> str:
    """The line and the mark of one series as an SVG of their own, for a legend beside a bare figure."""
    attributes: dict[str, Attribute] = {
        "viewBox": "0 0 26 14",
        "width": 26,
        "height": 14,
        "class": "dspark-plot",
        "aria-hidden": "true",
    }
    return element("svg", attributes, *_sample(figure, name, 0, 7))


@dataclass(frozen=True)
class _Box:
    """A plot area."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass
class _Taken:
    """What stands in a panel: lines and marks that are drawn, and rectangles where no note may stand."""

    lines: set[str] = field(default_factory=set)
    marks: set[tuple[str, str]] = field(default_factory=set)
    rooms: list[tuple[float, float, float, float]] = field(default_factory=list)  # left, top, right, bottom

    def claim(self, places: Iterable[tuple[float, float]], width: float, height: float) -> tuple[float, float]:
        """The first of some left ends of a base line at which a note runs into nothing; the first one if all do."""
        choices = list(places)
        free = (place for place in choices if not any(_meet(_room(place, width, height), one) for one in self.rooms))
        chosen = next(free, choices[0])
        self.rooms.append(_room(chosen, width, height))
        return chosen


class _Drawing:
    """Where everything of one figure stands."""

    def __init__(self, figure: Figure, name: str, *, bare: bool, narrow: bool) -> None:
        self.figure = figure
        self.name = name
        self.bare = bare
        series = [one for panel in figure.panels for one in panel.series]
        points = [point for one in series for point in one.points]
        self.x = figure.x.scale(point.x for point in points)
        self.y = figure.y.scale(
            value
            for point in points
            for value in (point.y, *(point.interval if point.interval is not None else ()))
            if figure.y.kind == "linear" or value > 0
        )
        self.columns = 1 if narrow else min(figure.columns, len(figure.panels))
        self.area = NARROW if narrow else AREAS[self.columns]
        # Tick labels decide how far the first plot area stands from the edge.
        self.gutter = 14 + max(text_width(tick.label, _SMALL) for tick in self.y.ticks)
        overhang = text_width(self.x.ticks[-1].label, _SMALL) / 2  # of the last label, beyond its plot area
        self.width = 16 + self.columns * (self.gutter + self.area[0]) + (self.columns - 1) * 10 + _EDGE
        self.width += max(_EDGE, overhang + 4)
        self.title = [] if bare else wrapped(figure.title, _TITLE, self.width - 2 * _EDGE)
        self.caption = [] if bare else wrapped(figure.caption, _SMALL, self.width - 2 * _EDGE)
        self.head = 0 if bare else _EDGE + 20 * len(self.title) + _LINE * len(self.caption)
        self.rows = -(-len(figure.panels) // self.columns)
        self.pitch = self.area[1] + 62  # a panel's title above, tick labels and the axis' label below
        self.legend = [] if bare else self._legend_rows()
        self.height = self.head + self.rows * self.pitch + 20 * len(self.legend) + _EDGE

    def document(self) -> str:
        name = self.name
        attributes: dict[str, Attribute] = {
            "xmlns": None if self.bare else "http://www.w3.org/2000/svg",  # HTML knows what an svg is
            "viewBox": f"0 0 {number(self.width)} {number(self.height)}",
            "width": self.width,
            "height": self.height,
            "class": "dspark-plot",
            "role": "img",
            "aria-labelledby": f"{name}-title {name}-desc",
            "font-family": FONT,
            "font-size": _SMALL,
        }
        parts = [
            element("title", {"id": f"{name}-title"}, escaped(self.figure.title)),
            element("desc", {"id": f"{name}-desc"}, escaped(self._description())),
            *([] if self.bare else [element("style", {}, escaped(style()))]),
            element("rect", {"class": "back", "width": self.width, "height": self.height, "rx": 6}),
            *self._head(),
            *(self._panel(index, panel) for index, panel in enumerate(self.figure.panels)),
            *self._legend(),
        ]
        return element("svg", attributes, "\n", *(f"{part}\n" for part in parts)) + "\n"

    def _description(self) -> str:
        """What the figure shows, in words, for whoever does not see it."""
        sentences = [self.figure.caption, f"{self.figure.y.label} against {self.figure.x.label}."]
        for panel in self.figure.panels:
            told = []
            for series in panel.series:
                if series.reference or not series.points:
                    continue
                first, last = series.points[0], series.points[-1]
                end = "" if first is last else f" to {last.y:.3g} at {last.x:.3g}"
                told.append(f"{series.name}: {first.y:.3g} at {first.x:.3g}{end}")
            sentences.append(f"{panel.title + ': ' if panel.title else ''}{'; '.join(told)}.")
        return " ".join(sentence for sentence in sentences if sentence)

    def _head(self) -> Iterator[str]:
        y = _EDGE
        for line in self.title:
            y += 20
            yield element(
                "text",
                {"class": "text", "x": _EDGE, "y": y - 6, "font-size": _TITLE, "font-weight": "600"},
                escaped(line),
            )
        for line in self.caption:
            y += _LINE
            yield element("text", {"class": "muted", "x": _EDGE, "y": y - 5}, escaped(line))

    def _panel(self, index: int, panel: Panel) -> str:
        row, column = divmod(index, self.columns)
        left = _EDGE + 16 + self.gutter + column * (self.gutter + self.area[0] + 10)
        box = _Box(left, self.head + row * self.pitch + 24, *self.area)
        lowest = index + self.columns >= len(self.figure.panels)
        parts = [*self._axes(box, labelled=(column == 0, lowest))]
        if panel.title:
            title = shortened(panel.title, 12, self.area[0] + 8)
            attributes: dict[str, Attribute] = {
                "class": "text",
                "x": box.left,
                "y": box.top - 8,
                "font-size": 12,
                "font-weight": "600",
            }
            parts.append(element("text", attributes, escaped(title)))
        points = [point for one in panel.series if not one.reference for point in one.points]
        middles = [(self._x(box, point.x), self._y(box, point.y)) for point in points]
        taken = _Taken(rooms=[(x - 4, y - 4, x + 4, y + 4) for x, y in middles])
        for series in sorted(panel.series, key=lambda one: not one.reference):  # measurements over references
            parts.append(self._series(box, series, taken))
        return element("g", {"class": "panel"}, "\n", *(f"{part}\n" for part in parts))

    def _axes(self, box: _Box, *, labelled: tuple[bool, bool]) -> Iterator[str]:
        for tick in self.x.ticks:
            x = self._x(box, tick.value)
            yield element("line", {"class": "grid", "x1": x, "x2": x, "y1": box.top, "y2": box.bottom})
        for tick in self.y.ticks:
            y = self._y(box, tick.value)
            yield element("line", {"class": "grid", "x1": box.left, "x2": box.right, "y1": y, "y2": y})
        frame = f"M{number(box.left)} {number(box.top)}V{number(box.bottom)}H{number(box.right)}"
        yield element("path", {"class": "axis", "d": frame})
        end = -math.inf
        for tick in self.x.ticks:
            x, half = self._x(box, tick.value), text_width(tick.label, _SMALL) / 2
            if x - half < end:
                continue  # it would run into the one before
            end = x + half + 4
            at: dict[str, Attribute] = {"class": "muted x-tick", "x": x, "y": box.bottom + 15, "text-anchor": "middle"}
            yield element("text", at, escaped(tick.label))
        for tick in self.y.ticks:
            at = {
                "class": "muted y-tick",
                "x": box.left - 6,
                "y": self._y(box, tick.value),
                "dy": "0.35em",
                "text-anchor": "end",
            }
            yield element("text", at, escaped(tick.label))
        if labelled[0]:
            x, y = _EDGE + 8, (box.top + box.bottom) / 2
            turned = f"rotate(-90 {number(x)} {number(y)})"
            at = {"class": "text", "x": x, "y": y, "text-anchor": "middle", "transform": turned}
            yield element("text", at, escaped(shortened(self.figure.y.label, _SMALL, box.height + 40)))
        if labelled[1]:
            at = {"class": "text", "x": (box.left + box.right) / 2, "y": box.bottom + 31, "text-anchor": "middle"}
            yield element("text", at, escaped(shortened(self.figure.x.label, _SMALL, box.width + 40)))

    def _series(self, box: _Box, series: Series, taken: _Taken) -> str:
        if series.reference:
            attributes = {"class": "reference", "d": self._path(box, series)}
            return element("path", attributes, element("title", {}, escaped(series.name)))
        place = self.figure.names.index(series.name)
        looks = looks_of(place)
        parts: list[str] = []
        if series.band:
            parts += self._band(box, series, looks.colour)
        if series.form != "points" and len(series.points) > 1:
            path = self._path(box, series)
            dash = looks.dash or (OVER if path in taken.lines else None)
            taken.lines.add(path)
            line = {"class": "line", "d": path, "stroke": looks.colour, "stroke-dasharray": dash}
            parts.append(element("path", line))
        for point in series.points if series.form != "steps" else ():
            parts += self._mark(box, series, point, looks, taken)
        return element("g", {"class": "series", "data-series": place}, *parts)

    def _mark(self, box: _Box, series: Series, point: Point, looks: Looks, taken: _Taken) -> Iterator[str]:
        x, y = self._x(box, point.x), self._y(box, point.y)
        if point.interval is not None and not series.band:
            low, high = (self._y(box, value) for value in point.interval)
            bar = f"M{number(x)} {number(low)}V{number(high)}m-3 0h6M{number(x - 3)} {number(low)}h6"
            yield element("path", {"class": "interval", "d": bar, "stroke": looks.colour})
        outline: dict[str, Attribute] = {
            "class": "mark",
            "d": f"M{number(x)} {number(y)}{looks.shape}",
            "fill": looks.colour,
        }
        if (number(x), number(y)) in taken.marks:  # hollow, so that the one below is seen
            outline |= {"fill": "none", "stroke": looks.colour, "stroke-width": 1.5, "pointer-events": "all"}
        taken.marks.add((number(x), number(y)))
        yield element("path", outline, element("title", {}, escaped(_told(series, point, self.figure.x))))
        if point.note:
            wide = text_width(point.note, _NOTE)
            sides = (x + 6, x - 6 - wide)
            at = taken.claim(((left, y + down) for down in (-5, 11, -15, 21) for left in sides), wide, _NOTE)
            attributes: dict[str, Attribute] = {"class": "muted note", "x": at[0], "y": at[1], "font-size": _NOTE}
            yield element("text", attributes, escaped(point.note))

    def _band(self, box: _Box, series: Series, colour: str) -> Iterator[str]:
        known = [(point.x, point.interval) for point in series.points if point.interval is not None]
        if len(known) < 2:
            return
        there = [(self._x(box, x), self._y(box, interval[0])) for x, interval in known]
        back = [(self._x(box, x), self._y(box, interval[1])) for x, interval in reversed(known)]
        outline = "L".join(f"{number(x)} {number(y)}" for x, y in [*there, *back])
        yield element("path", {"class": "band", "d": f"M{outline}z", "fill": colour})

    def _path(self, box: _Box, series: Series) -> str:
        places = [(self._x(box, point.x), self._y(box, point.y)) for point in series.points]
        if series.form != "steps":
            return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in places)
        first, *others = places
        return f"M{number(first[0])} {number(first[1])}" + "".join(f"H{number(x)}V{number(y)}" for x, y in others)

    def _legend_rows(self) -> list[list[tuple[str, float]]]:
        """Names of the legend's rows, each with where it begins."""
        names = self.figure.names
        rows: list[list[tuple[str, float]]] = []
        x = math.inf
        for name in names if len(names) > 1 else ():
            room = 34 + text_width(self._short(name), _SMALL) + 16
            if x + room > self.width - _EDGE:
                rows.append([])
                x = float(_EDGE)
            rows[-1].append((name, x))
            x += room
        return rows

    def _short(self, name: str) -> str:
        return shortened(name, _SMALL, min(260.0, self.width - 2 * _EDGE - 50))

    def _legend(self) -> Iterator[str]:
        for index, row in enumerate(self.legend):
            y = self.head + self.rows * self.pitch + 20 * index + 8
            for name, x in row:
                label: dict[str, Attribute] = {"class": "text", "x": x + 32, "y": y, "dy": "0.35em"}
                text = element("text", label, escaped(self._short(name)))
                yield element("g", {"class": "key"}, *_sample(self.figure, name, x, y), text)

    def _x(self, box: _Box, value: float) -> float:
        return box.left + self.x.place(value) * box.width

    def _y(self, box: _Box, value: float) -> float:
        if self.y.logarithmic and value <= 0:
            return box.bottom  # the lower end of an interval
        return box.bottom - self.y.place(value) * box.height


def _room(place: tuple[float, float], width: float, height: float) -> tuple[float, float, float, float]:
    return place[0], place[1] - height, place[0] + width, place[1]


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    """Whether two rectangles have anything in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _sample(figure: Figure, name: str, x: float, y: float) -> Iterator[str]:
    """What a series looks like, from `x` on and around `y`."""
    looks = looks_of(figure.names.index(name))
    forms = {one.form for panel in figure.panels for one in panel.series if one.name == name}
    if "points" not in forms:
        stroke = f"M{number(x)} {number(y)}h26"
        yield element("path", {"class": "line", "d": stroke, "stroke": looks.colour, "stroke-dasharray": looks.dash})
    if "steps" not in forms:
        yield element("path", {"d": f"M{number(x + 13)} {number(y)}{looks.shape}", "fill": looks.colour})


def _told(series: Series, point: Point, x: Axis) -> str:
    """What a mark says when pointed at."""
    said = f"{series.name}: {point.y:.4g} at {x.said(point.x)}"
    if point.interval is not None:
        said += f", 95 % [{point.interval[0]:.4g}, {point.interval[1]:.4g}]"
    if point.n is not None:
        said += f", n = {point.n}"
    return said + (f" ({point.note})" if point.note else "")
