"""Figures in their place, or why they are not there."""

from __future__ import annotations

from collections.abc import Iterator

from dspark.report.build_plots import Drawn
from dspark.report.page.model import Chart, Missing


def charts(drawn: Drawn, *kinds: str) -> Iterator[Chart | Missing]:
    """The figures of some kinds, `reliability` and `reliability-...` alike; after them what could not be drawn."""
    for kind in kinds:
        for figure in drawn.figures:
            if _is(figure.name, kind):
                yield Chart(figure)
        for name, reason in drawn.absent.items():
            if _is(name, kind):
                yield Missing(f"figure {name}", reason)


def _is(name: str, kind: str) -> bool:
    return name == kind or name.startswith((f"{kind}-", f"{kind},"))
