"""All temperatures at once: coordinate descent on the mean ECE of the survival over all positions.

Left to right, T_k is chosen for its own position, and what it leaves wrong is passed on: every later survival has the
factor c_k. Here a change of one temperature is judged by all positions that it changes. The steps along the grid of
log T start large and are halved when none helps, so that few of the grid's temperatures are tried.

The mean ECE is noisy and its minimum is an optimistic choice; whether it is kept is for held-out conversations to say.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark.calibration.records import Records
from dspark.calibration.reliability import ece
from dspark.scheduling.survival import confidences

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

MOST_ROWS = 20_000  # whole conversations up to about so many tell all that a grid step changes
FIRST_STEP = 16  # of the grid
MOST_SWEEPS = 60  # each ends with a better mean ECE or a smaller step; far more than are needed


def descend(records: Records, start: Floats, free: Flags, grid: Floats, bins: int) -> Floats:
    """Temperatures whose mean ECE none of their neighbours on the grid improves, one position at a time.

    Args:
        records: to fit on.
        start: where to begin, [gamma], of the grid.
        free: positions that may move, [gamma]; the others keep their temperature.
        grid: temperatures in rising order.
    Returns:
        [gamma].
    """
    part = _Sample(_some(records), bins)
    chosen = np.array([int(np.abs(grid - value).argmin()) for value in start])
    best, step = part.error(grid[chosen]), FIRST_STEP
    for _ in range(MOST_SWEEPS):
        before = best
        for k in np.flatnonzero(free):
            for move in (-step, step):
                trial = chosen.copy()
                trial[k] = min(max(trial[k] + move, 0), grid.size - 1)
                error = part.error(grid[trial])
                if error < best:
                    chosen, best = trial, error
        if best == before:
            if step == 1:
                break
            step //= 2
    return np.where(free, grid[chosen], start)


class _Sample:
    """The mean ECE of some records, whose confidences are worked out once per temperature."""

    def __init__(self, records: Records, bins: int) -> None:
        self._records, self._bins = records, bins
        self._confidences: dict[tuple[int, float], Floats] = {}
        self._positions = np.flatnonzero(records.known.any(axis=0))

    def error(self, temperatures: Floats) -> float:
        """Over the positions that have samples, unweighted."""
        survival, errors = np.ones(len(self._records)), []
        for k in self._positions:
            survival = survival * self._confidence(int(k), float(temperatures[k]))
            known = self._records.known[:, k]
            errors.append(ece(survival[known], self._records.survived[known, k], self._bins))
        return float(np.mean(errors))

    def _confidence(self, k: int, temperature: float) -> Floats:
        key = (k, temperature)
        if key not in self._confidences:
            self._confidences[key] = confidences(self._records.z[:, k], temperature)
        return self._confidences[key]


def _some(records: Records) -> Records:
    """All records, or as many whole conversations as hold about `MOST_ROWS`."""
    if len(records) <= MOST_ROWS:
        return records
    parts = -(-len(records) // MOST_ROWS)
    groups, _ = records.groups(parts)
    return records.take(groups == 0)
