"""Charts as data: what is drawn (`drawing.render`) and written as CSV (`table`) from the same numbers.

A figure has panels, side by side on common axes; a panel has series; a series has points with intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dspark.io.csvfile import csv_text
from dspark.report import scales
from dspark.report.scales import Scale

# Plot areas in pixels by the number of panels beside each other.
AREAS = {1: (600, 320), 2: (300, 230), 3: (200, 180), 4: (150, 150)}
NARROW = (244, 170)  # of panels below each other on a page that is 360 pixels wide


@dataclass(frozen=True)
class Point:
    """One measured value.

    Attributes:
        interval: of y, 95 %; None: none is known.
        n: observations that y rests on.
        note: a word beside the mark, such as the number of requests.
    """

    x: float
    y: float
    interval: tuple[float, float] | None = None
    n: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one name; series of one name look alike in all panels.

    Attributes:
        form: `line` joins marks, `steps` holds each value until the next and has no marks, `points` joins nothing.
        band: intervals as a band along the line, not as bars.
        reference: a grey line to compare with; it is no measurement, and no part of the table.
    """

    name: str
    points: tuple[Point, ...]
    form: Literal["line", "steps", "points"] = "line"
    band: bool = False
    reference: bool = False


@dataclass(frozen=True)
class Panel:
    """One of a figure's plots; all share both axes."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes:
        key: column of the table.
        label: words beside the axis, with the unit.
        low, high: where it has to begin and end; None: round values that hold all data.
        kind: `values` is logarithmic with ticks at the data's own values.
        whole: ticks are whole numbers.
        names: of what stands at 0, 1, ...; then none of the above but `key` and `label` is looked at.
    """

    key: str
    label: str
    low: float | None = None
    high: float | None = None
    kind: Literal["linear", "logarithmic", "values"] = "linear"
    whole: bool = False
    names: tuple[str, ...] = ()

    def said(self, value: float) -> str:
        """A value in words, with the axis' name where it is a name itself."""
        return f"{self.label} {self.names[round(value)]}" if self.names else f"{value:.4g}"

    def scale(self, values: Iterable[float]) -> Scale:
        """The scale that holds some values."""
        if self.names:
            return scales.named(self.names)
        known = list(values)
        if self.kind == "linear":
            return scales.linear(known, low=self.low, high=self.high, whole=self.whole)
        return scales.at_values(known) if self.kind == "values" else scales.logarithmic(known)


@dataclass(frozen=True)
class Figure:
    """A figure and its data.

    Attributes:
        name: of its files: lower-case letters, digits, dots and hyphens.
        title: what is shown, over all panels.
        caption: what one must know to read it, in a sentence or two.
        columns: panels beside each other, 1 to 4.
    Raises:
        ValueError: nothing to draw, a number that is not finite, an interval without order.
    """

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    panels: tuple[Panel, ...]
    columns: int = 1

    def __post_init__(self) -> None:
        points = [point for panel in self.panels for series in panel.series for point in series.points]
        if not points or self.columns not in AREAS:
            raise ValueError(f"figure {self.name}: no point to draw, or {self.columns} columns")
        for point in points:
            if not all(map(math.isfinite, (point.x, point.y, *(point.interval or ())))):
                raise ValueError(f"figure {self.name}: {point} is not finite")
            if point.interval is not None and point.interval[0] > point.interval[1]:
                raise ValueError(f"figure {self.name}: the interval of {point} ends before it begins")

    @property
    def names(self) -> list[str]:
        """Names of the measured series, in the order in which they first appear."""
        return list(dict.fromkeys(one.name for panel in self.panels for one in panel.series if not one.reference))


def rows(figure: Figure) -> list[tuple[str, str, Point]]:
    """Panel, series and point of every measured value, in the order in which they are drawn."""
    return [
        (panel.title, series.name, point)
        for panel in figure.panels
        for series in panel.series
        if not series.reference
        for point in series.points
    ]


def table(figure: Figure) -> str:
    """The figure's numbers as CSV: one row per point; what is not known is an empty cell."""
    cells: list[list[object]] = []
    for panel, series, point in rows(figure):
        low, high = point.interval or (None, None)
        cells.append([panel, series, point.x, point.y, low, high, point.n, point.note])
    return csv_text(["panel", "series", figure.x.key, figure.y.key, "low", "high", "n", "note"], cells)
