"""One half of the records, position after position: what a temperature does to ECE and log-loss there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.calibration.condensed import MOST_ROWS, StatedPoints, SurvivalPoints, log_losses
from dspark.calibration.records import Records
from dspark.calibration.resampling import MOST_GROUPS, Estimate, Resampling
from dspark.scheduling.survival import confidences

Floats = NDArray[np.float64]

# Condensed rows are points per group; so many groups tell the noise of an ECE within a fifth.
_FEW_GROUPS = 16


@dataclass
class Half:
    """Records with the survival up to the position that is being looked at.

    Attributes:
        before: survival of all earlier positions with their temperatures, [n].
    """

    records: Records
    resampling: Resampling
    before: Floats

    @classmethod
    def of(cls, records: Records, resamples: int, seed: int) -> Half:
        """At the first position, to judge temperatures on."""
        return cls(records, Resampling.of(records, resamples=resamples, seed=seed), np.ones(len(records)))

    @classmethod
    def to_fit(cls, records: Records, resamples: int, seed: int) -> Half:
        """At the first position, to fit temperatures on, which tries many."""
        groups = _FEW_GROUPS if len(records) > MOST_ROWS else MOST_GROUPS
        resampling = Resampling.of(records, resamples=resamples, seed=seed, most_groups=groups)
        return cls(records, resampling, np.ones(len(records)))

    def append(self, k: int, temperature: float) -> None:
        """Go on to the position after k, which has this temperature."""
        self.before = self.before * confidences(self.records.z[:, k], temperature)

    def points(self, k: int) -> SurvivalPoints:
        """The rows whose outcome at position k is known."""
        known = self.records.known[:, k]
        return SurvivalPoints.of(
            self.before[known],
            self.records.z[known, k],
            self.records.survived[known, k],
            self.resampling.groups[known],
            self.resampling.count,
        )

    def stated(self, k: int) -> Floats:
        """The logit of what happened at the rows that reached position k: z if it was accepted, else -z."""
        reached = self.records.reached[:, k]
        stated: Floats = self.records.z[reached, k]
        np.negative(stated, out=stated, where=~self.records.survived[reached, k])
        return stated

    def log_losses_of_grid(self, k: int, grid: Floats) -> Floats:
        """Sum of log-loss of c_k over the rows that reached position k, at each temperature."""
        points = StatedPoints.of(self.stated(k))
        return np.array([points.log_loss(value) for value in grid])

    def log_loss_change(self, positions: Sequence[int], temperature: float) -> Estimate:
        """Log-loss of c_k at T less that at 1, per draft that reached one of these positions."""
        sums = sizes = np.zeros(self.resampling.count)
        conversations = 0
        for k in positions:
            reached, stated = self.records.reached[:, k], self.stated(k)
            cases = self.resampling.cases(reached, self.records.survived[reached, k])
            sums = sums + cases.sums(log_losses(stated, temperature) - log_losses(stated, 1.0))
            sizes = sizes + cases.sizes
            conversations = max(conversations, cases.conversations)  # who reached a position reached those before it
        return self.resampling.ratio(sums, sizes, conversations)

    def ece_change(self, k: int, temperature: float, bins: int) -> Estimate:
        """ECE of a_k at T less that at 1."""
        known = self.records.known[:, k]
        before, z = self.before[known], self.records.z[known, k]
        cases = self.resampling.cases(known, self.records.survived[known, k])
        return cases.ece(before * confidences(z, temperature), bins) - cases.ece(before * confidences(z, 1.0), bins)
