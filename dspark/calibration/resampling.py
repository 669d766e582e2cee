"""The bootstrap over conversations, shared by the fit, its judgement and the reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.calibration.records import Records
from dspark.calibration.reliability import Binning, auroc, bin_gaps
from dspark.measured import Measured

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
Flags = NDArray[np.bool_]

MOST_GROUPS = 200  # more conversations than this are resampled in groups of whole conversations: cheap, and as valid
SCORE_LEVELS = 1024  # of AUROC's resamples; its value is exact


@dataclass(frozen=True)
class Estimate:
    """A statistic on all conversations and on each bootstrap sample of them.

    ECE is biased upwards by noise, and a bootstrap sample is noisier than the data, so plain percentiles of its ECE
    lie too high, often above the value itself. The draws are therefore centred on the value: their spread counts,
    their bias does not.
    """

    value: float
    draws: Floats  # [resamples]; NaN where a sample leaves the statistic undefined
    conversations: int

    def __sub__(self, other: Estimate) -> Estimate:
        """The paired difference of two statistics of the same resampling."""
        return Estimate(self.value - other.value, self.draws - other.draws, self.conversations)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        defined = self.draws[np.isfinite(self.draws)]
        if defined.size == 0:
            return self.value, self.value
        low, high = self.value + np.quantile(defined, [0.025, 0.975]) - defined.mean()
        return float(min(low, self.value)), float(max(high, self.value))

    def measured(self, low: float = -1.0, high: float = 1.0) -> Measured:
        """The value with its interval, cut to the range of the statistic; n counts conversations."""
        ends = self.interval
        return Measured(value=self.value, n=self.conversations, ci95=(max(ends[0], low), min(ends[1], high)))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The unweighted mean of statistics of the same resampling."""
    return Estimate(
        float(np.mean([one.value for one in estimates])),
        np.mean([one.draws for one in estimates], axis=0),
        estimates[0].conversations,
    )


@dataclass(frozen=True)
class Resampling:
    """How often each group of conversations occurs in each bootstrap sample.

    One instance serves everything that is compared, so that differences are paired.
    """

    groups: Integers  # the group of each row, [n]
    count: int
    conversations: int
    weights: Floats  # [resamples, groups]; each row sums to `count`

    @classmethod
    def of(cls, records: Records, *, resamples: int = 1000, seed: int = 0) -> Resampling:
        """Resample the conversations of `records`."""
        groups, count = records.groups(MOST_GROUPS)
        weights = np.zeros((resamples, count))
        if count:
            weights[:] = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
        return cls(groups, count, records.conversations, weights)

    def ratio(self, sums: Floats, sizes: Floats) -> Estimate:
        """sum(sums) / sum(sizes), both per group, [groups]."""
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = (self.weights @ sums) / (self.weights @ sizes)
        return Estimate(float(sums.sum() / sizes.sum()), draws, self.conversations)

    def sums(self, values: Floats, rows: Flags) -> Floats:
        """Sum of values over the chosen rows, per group. values: of those rows; rows: [n]."""
        return np.bincount(self.groups[rows], weights=values, minlength=self.count).astype(np.float64)

    def mean(self, values: Floats, rows: Flags) -> Estimate:
        """Mean of `values`, which belong to the chosen rows; at least one."""
        return self.ratio(self.sums(values, rows), self.sums(np.ones(values.size), rows))

    def ece(self, probabilities: Floats, outcomes: Flags, rows: Flags, bins: int, binning: Binning) -> Estimate:
        """Expected calibration error over the chosen rows, at least one; bin edges stay those of all rows."""
        gaps = bin_gaps(probabilities, outcomes, bins, self.groups[rows], self.count, binning)
        sizes = self.sums(np.ones(probabilities.size), rows)
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = np.abs(self.weights @ gaps).sum(axis=1) / (self.weights @ sizes)
        return Estimate(float(np.abs(gaps.sum(axis=0)).sum() / sizes.sum()), draws, self.conversations)

    def auroc(self, scores: Floats, outcomes: Flags, rows: Flags) -> Estimate | None:
        """AUROC over the chosen rows; None if only one outcome occurred. Draws see scores at 1024 levels."""
        value = auroc(scores, outcomes)
        if value is None:
            return None
        edges = np.unique(np.quantile(scores, np.arange(1, SCORE_LEVELS) / SCORE_LEVELS))
        levels = edges.size + 1
        cells = self.groups[rows] * levels + np.searchsorted(edges, scores, side="right")
        shape = (self.count, levels)
        happened = np.bincount(cells[outcomes], minlength=self.count * levels).reshape(shape).astype(np.float64)
        failed = np.bincount(cells[~outcomes], minlength=self.count * levels).reshape(shape).astype(np.float64)
        # wins[g, h]: pairs in which a case of group g that happened scores above one of group h that did not.
        wins = happened @ (np.cumsum(failed, axis=1) - failed / 2).T
        pairs = (self.weights @ happened.sum(axis=1)) * (self.weights @ failed.sum(axis=1))
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = ((self.weights @ wins) * self.weights).sum(axis=1) / pairs
        return Estimate(value, draws, self.conversations)
