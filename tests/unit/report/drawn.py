"""Reads a figure back from its SVG: what the ticks say is all that is known of its scales."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

NAMESPACE = "{http://www.w3.org/2000/svg}"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [one for one in root.iter() if name in one.get("class", "").split()]


def numbers(path: str) -> list[float]:
    return [float(text) for text in _NUMBER.findall(path)]


def axis(panel: ElementTree.Element, which: str, *, logarithmic: bool = False) -> Callable[[float], float]:
    """From pixels to values, by the straight line through the first and the last tick.

    A tick's label stands at its own x, or y.
    """
    ticks = of_class(panel, f"{which}-tick")
    places = [(float(tick.get(which)), float(tick.text.replace(",", ""))) for tick in ticks]
    (first, low), (last, high) = places[0], places[-1]
    assert first != last, "one tick is no scale"
    bend, unbend = (math.log, math.exp) if logarithmic else (float, float)
    slope = (bend(high) - bend(low)) / (last - first)
    for pixel, value in places:  # the ticks between lie on the line, too
        assert abs(bend(low) + slope * (pixel - first) - bend(value)) < 0.02 * abs(bend(high) - bend(low))
    return lambda pixel: unbend(bend(low) + slope * (pixel - first))


def marks(panel: ElementTree.Element) -> list[tuple[float, float]]:
    """Centres of the marks, in pixels, in the order of the document."""
    return [tuple(numbers(mark.get("d"))[:2]) for mark in of_class(panel, "mark")]


def intervals(panel: ElementTree.Element) -> list[tuple[float, float]]:
    """Lower and upper ends of the bars, in pixels: `M x low V high ...`."""
    found = []
    for bar in of_class(panel, "interval"):
        _, low, high, *_ = numbers(bar.get("d"))
        found.append((low, high))
    return found
