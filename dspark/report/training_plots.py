"""How training went: loss and the dev split's tau against steps, from `curves.csv`."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from dspark.errors import DataError
from dspark.report.chart import Axis, Figure, Panel, Point, Series

_WINDOWS = 60  # of steps whose losses are averaged: single ones are noise
_AGAIN = "make it again with `dspark run`"
_STEP, _LOSS = "step", "loss"
_TAUS = {"dev_anchor_tau": "greedy", "dev_anchor_tau_sampled": "sampled"}


def training_figures(curves: Path) -> list[Figure]:
    """Loss, and tau over the anchors of the dev split.

    Raises:
        DataError: the file is missing or not such a file, or nothing was trained.
    """
    rows = _read(curves)
    losses = [(row[_STEP], row[_LOSS]) for row in rows if _STEP in row and _LOSS in row]
    if not losses:
        raise DataError("nothing was trained: an imported drafter has no curves" if not rows else f"{curves}: no loss")
    figures = [_loss(losses)]
    taus = [
        Series(name, tuple(Point(row[_STEP], row[key]) for row in rows if key in row)) for key, name in _TAUS.items()
    ]
    known = tuple(series for series in taus if series.points)
    if known:
        figures.append(
            Figure(
                name="training-tau",
                title="Tokens per cycle on the dev split while training",
                caption="A mean over spaced anchors, which overstates the decoding loop's tau; it chooses the "
                "checkpoint and proves nothing else. No intervals.",
                x=Axis("step", "training step", low=0),
                y=Axis("dev_anchor_tau", "tau over anchors"),
                panels=(Panel("", known),),
            )
        )
    return figures


def _loss(losses: list[tuple[float, float]]) -> Figure:
    width = math.ceil(len(losses) / _WINDOWS)
    windows = [losses[start : start + width] for start in range(0, len(losses), width)]
    points = tuple(
        Point(window[-1][0], sum(loss for _, loss in window) / len(window), n=len(window)) for window in windows
    )
    means = f" Each point is the mean of up to {width} steps." if width > 1 else ""
    return Figure(
        name="training-loss",
        title="Training loss",
        caption=f"Weighted sum of cross-entropy, L1 and confidence loss of the training batches.{means}",
        x=Axis("step", "training step", low=0),
        y=Axis("loss", "loss"),
        panels=(Panel("", (Series("loss", points),)),),
    )


def _read(curves: Path) -> list[dict[str, float]]:
    """The rows; a cell that is empty, or is no finite number, is not in its row.

    Raises:
        DataError: missing, or a cell is no number.
    """
    try:
        with curves.open(encoding="utf-8", newline="") as handle:
            found = [
                {key: float(cell) for key, cell in row.items() if isinstance(cell, str) and cell}
                for row in csv.DictReader(handle)
            ]
    except FileNotFoundError:
        raise DataError(f"{curves}: file not found", _AGAIN) from None
    except (OSError, ValueError) as reason:
        raise DataError(f"{curves}: no curves of a training run: {reason}", _AGAIN) from None
    return [{key: value for key, value in row.items() if math.isfinite(value)} for row in found]
