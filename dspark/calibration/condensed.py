"""Many rows as few points, so that a position's fit can try every temperature of the grid on all of them.

Up to `MOST_ROWS` every row is a point and nothing is lost. Beyond, rows that are alike become one point with their
mean and their number. What a fit asks for are sums of smooth functions over rows, which feel the spread within a point
only in second order, and that is made far smaller than what a step of the grid changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.calibration.reliability import bin_index, cell_gaps
from dspark.scheduling.survival import confidences

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.intp]

MOST_ROWS = 50_000
SURVIVAL_LEVELS, LOGIT_LEVELS = 32, 48  # of points, per group
STATED_LEVELS = 2048
_SAMPLE = 20_000  # rows that say where the levels lie
_MARKS = 4096


@dataclass(frozen=True)
class SurvivalPoints:
    """Rows at which the survival up to a position is held against what happened.

    Attributes:
        before: survival up to the position before, [points].
        z: logit of the position, [points].
        size: rows that a point stands for, [points].
        survived: of those, accepted up to and including the position, [points].
        groups: the group of resampling, [points]; rows of different groups are never one point.
        count: how many groups there are.
    """

    before: Floats
    z: Floats
    size: Floats
    survived: Floats
    groups: Integers
    count: int

    @classmethod
    def of(cls, before: Floats, z: Floats, survived: Flags, groups: Integers, count: int) -> SurvivalPoints:
        """Of rows, all [rows]."""
        if before.size <= MOST_ROWS:
            return cls(before, z, np.ones(before.size), survived.astype(np.float64), groups, count)
        cells = (groups * SURVIVAL_LEVELS + _levels(before, SURVIVAL_LEVELS)) * LOGIT_LEVELS + _levels(z, LOGIT_LEVELS)
        size = np.bincount(cells)
        used = np.flatnonzero(size)
        return cls(
            np.bincount(cells, weights=before)[used] / size[used],
            np.bincount(cells, weights=z)[used] / size[used],
            size[used].astype(np.float64),
            np.bincount(cells[survived], minlength=size.size)[used].astype(np.float64),
            used // (SURVIVAL_LEVELS * LOGIT_LEVELS),
            count,
        )

    def gaps(self, temperature: float, bins: int) -> Floats:
        """sum(survival - outcome) per group and bin of survival at a temperature of this position, [groups, bins]."""
        survival = self.before * confidences(self.z, temperature)
        index = bin_index(survival, bins)
        return cell_gaps(survival * self.size, self.survived, index, bins, self.groups, self.count)


@dataclass(frozen=True)
class StatedPoints:
    """Logits of what happened: z where a draft was accepted, -z where it was not.

    Attributes:
        z: [points].
        size: rows that a point stands for, [points].
    """

    z: Floats
    size: Floats

    @classmethod
    def of(cls, z: Floats) -> StatedPoints:
        """Of rows, [rows]."""
        if z.size <= MOST_ROWS:
            return cls(z, np.ones(z.size))
        # Narrow around 0, where the loss bends, and ever wider further out.
        cells = ((z / (4 + np.abs(z)) + 1) * (STATED_LEVELS / 2)).astype(np.intp).clip(0, STATED_LEVELS - 1)
        size = np.bincount(cells)
        used = np.flatnonzero(size)
        return cls(np.bincount(cells, weights=z)[used] / size[used], size[used].astype(np.float64))

    def log_loss(self, temperature: float) -> float:
        """Sum of -log of the probability that was stated for what happened."""
        return float((log_losses(self.z, temperature) * self.size).sum())


def log_losses(stated: Floats, temperature: float) -> Floats:
    """-log sigmoid(z / T), elementwise, finite."""
    losses: Floats = -np.log(np.maximum(confidences(stated, temperature), np.finfo(np.float64).tiny))
    return losses


def _levels(values: Floats, levels: int) -> Integers:
    """Which of so many ranges each value is in, [rows]; the ranges hold about the same number of different values."""
    sample = np.sort(values[:: max(values.size // _SAMPLE, 1)])
    low, high = sample[0], sample[-1]
    # A fine ruler first, and for each of its marks the level: a search in the edges for every row would take longer.
    marks = ((np.clip(values, low, high) - low) * (_MARKS / max(high - low, 1e-300))).astype(np.intp)
    at = np.searchsorted(sample, low + (high - low) * np.arange(_MARKS + 1) / _MARKS)
    level: Integers = (at * levels // (sample.size + 1))[marks]
    return level
