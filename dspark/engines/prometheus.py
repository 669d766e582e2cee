"""Prometheus' text format, as far as engines' counters need it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?\s*$", re.ASCII)
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)


@dataclass(frozen=True)
class Sample:
    """One line: a metric's value under some labels."""

    name: str
    labels: dict[str, str]
    value: float


def parse_samples(text: str) -> Iterator[Sample]:
    """All samples of a text; comments, and lines that are none, are passed over."""
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        yield Sample(found["name"], dict(_LABEL.findall(found["labels"] or "")), value)
