"""A figure's numbers as a table that people read: what stands on a named axis by its name, intervals in one cell."""

from __future__ import annotations

from dspark.report.chart import Axis, Figure, rows
from dspark.report.words import NOTHING


def point_rows(figure: Figure) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows, one for each measured point; columns in which nothing stands are left out."""
    header = ("panel", "series", figure.x.label, figure.y.label, "95 % interval", "n", "note")
    found = [
        (
            panel,
            series,
            _at(figure.x, point.x),
            f"{point.y:.6g}",
            f"[{point.interval[0]:.6g}, {point.interval[1]:.6g}]" if point.interval is not None else "",
            str(point.n) if point.n is not None else "",
            point.note,
        )
        for panel, series, point in rows(figure)
    ]
    kept = [column for column in range(len(header)) if column in (2, 3) or any(row[column] for row in found)]
    return (
        tuple(header[column] for column in kept),
        [tuple(row[column] or NOTHING for column in kept) for row in found],
    )


def _at(axis: Axis, value: float) -> str:
    return axis.names[round(value)] if axis.names else f"{value:.6g}"
