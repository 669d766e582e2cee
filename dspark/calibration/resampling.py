"""The bootstrap over conversations, shared by the fit, its judgement and the reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dspark.calibration.records import Records, different
from dspark.calibration.reliability import bin_index, cell_gaps, mass_edges, sorted_auroc
from dspark.measured import Measured

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
Flags = NDArray[np.bool_]

MOST_GROUPS = 200  # more conversations than this are resampled in groups of whole conversations: cheap, and as valid
SCORE_LEVELS = 256  # of AUROC's resamples; its value is exact


@dataclass(frozen=True)
class Estimate:
    """A statistic on all conversations and on each bootstrap sample of them.

    ECE is biased upwards by noise, and a bootstrap sample is noisier than the data, so plain percentiles of its ECE
    lie too high, often above the value itself. The draws are therefore centred on the value: their spread counts,
    their bias does not.
    """

    value: float
    draws: Floats  # [resamples]; NaN where a sample leaves the statistic undefined
    conversations: int  # that the statistic saw anything of

    def __sub__(self, other: Estimate) -> Estimate:
        """The paired difference of two statistics of the same resampling."""
        return Estimate(self.value - other.value, self.draws - other.draws, self.conversations)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval; without bounds if no sample defines the statistic."""
        defined = self.draws[np.isfinite(self.draws)]
        if defined.size == 0:
            return -np.inf, np.inf
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
        max(one.conversations for one in estimates),
    )


@dataclass(frozen=True)
class Resampling:
    """How often each group of conversations occurs in each bootstrap sample.

    One instance serves everything that is compared, so that differences are paired.
    """

    groups: Integers  # the group of each row, [n]
    count: int
    conversation_of: Integers  # of each row, [n]
    weights: Floats  # [resamples, groups]; each row sums to `count`

    @classmethod
    def of(
        cls, records: Records, *, resamples: int = 1000, seed: int = 0, most_groups: int = MOST_GROUPS
    ) -> Resampling:
        """Resample the conversations of `records`."""
        groups, count = records.groups(most_groups)
        weights = np.zeros((resamples, count))
        if count:
            weights[:] = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
        return cls(groups, count, records.conversation_of, weights)

    def ratio(self, sums: Floats, sizes: Floats, conversations: int) -> Estimate:
        """sum(sums) / sum(sizes), both per group, [groups], of cases from so many conversations."""
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = (self.weights @ sums) / (self.weights @ sizes)
        return Estimate(float(sums.sum() / sizes.sum()), draws, conversations)

    def cases(self, rows: Flags, outcomes: Flags) -> Cases:
        """The rows that are scored, a mask [n] with at least one, and what happened at them, [cases]."""
        groups, names = self.groups, self.conversation_of
        if not rows.all():
            groups, names = groups[rows], names[rows]
        sizes = np.bincount(groups, minlength=self.count).astype(np.float64)
        return Cases(self, groups, sizes, outcomes, different(names))


@dataclass(frozen=True)
class Cases:
    """What probabilities are scored against, by group of conversations.

    Attributes:
        groups: of each case, [cases].
        sizes: how many cases each group has, [groups].
        outcomes: what happened, [cases].
        conversations: that the cases come from.
    """

    resampling: Resampling
    groups: Integers
    sizes: Floats
    outcomes: Flags
    conversations: int

    def sums(self, values: Floats) -> Floats:
        """Sum of the values of the cases, per group."""
        return np.bincount(self.groups, weights=values, minlength=self.resampling.count).astype(np.float64)

    def mean(self, values: Floats) -> Estimate:
        """Mean of the values of the cases."""
        return self.resampling.ratio(self.sums(values), self.sizes, self.conversations)

    def ece(self, probabilities: Floats, bins: int) -> Estimate:
        """Expected calibration error with bins of equal width."""
        return self._ece(probabilities, bin_index(probabilities, bins), bins)

    def ranked(self, scores: Floats) -> Ranked:
        """The cases by rising score, sorted once for all that asks for the order."""
        order = np.argsort(scores)
        return Ranked(scores[order], replace(self, groups=self.groups[order], outcomes=self.outcomes[order]))

    def _ece(self, probabilities: Floats, index: Integers, bins: int) -> Estimate:
        gaps = cell_gaps(probabilities, self.outcomes, index, bins, self.groups, self.resampling.count)
        weights = self.resampling.weights
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = np.abs(weights @ gaps).sum(axis=1) / (weights @ self.sizes)
        value = float(np.abs(gaps.sum(axis=0)).sum() / self.sizes.sum())
        return Estimate(value, draws, self.conversations)


@dataclass(frozen=True)
class Ranked:
    """Cases by rising score.

    Attributes:
        scores: [cases], rising.
        cases: in the same order.
    """

    scores: Floats
    cases: Cases

    def ece_equal_mass(self, bins: int) -> Estimate:
        """Expected calibration error with bins that hold about as many cases each; they stay those of all cases."""
        edges = np.searchsorted(self.scores, mass_edges(self.scores, bins))
        index = np.repeat(np.arange(bins), np.diff(edges, prepend=0, append=self.scores.size))
        return self.cases._ece(self.scores, index, bins)

    def auroc(self) -> Estimate | None:
        """AUROC; None if only one outcome occurred. Draws see scores at 256 levels."""
        groups, happened, resampling = self.cases.groups, self.cases.outcomes, self.cases.resampling
        value = sorted_auroc(self.scores, happened)
        if value is None:
            return None
        levels = _levels(self.scores)
        width = int(levels[-1]) + 1
        cells = groups * width + levels
        shape = (resampling.count, width)
        everyone = np.bincount(cells, minlength=resampling.count * width).reshape(shape).astype(np.float64)
        accepted = np.bincount(cells[happened], minlength=resampling.count * width).reshape(shape).astype(np.float64)
        rejected = everyone - accepted
        # wins[g, h]: pairs in which an accepted case of group g scores above a rejected one of group h.
        wins = accepted @ (np.cumsum(rejected, axis=1) - rejected / 2).T
        weights = resampling.weights
        pairs = (weights @ accepted.sum(axis=1)) * (weights @ rejected.sum(axis=1))
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = ((weights @ wins) * weights).sum(axis=1) / pairs
        return Estimate(value, draws, self.cases.conversations)


def _levels(ranked: Floats) -> Integers:
    """Which of `SCORE_LEVELS` quantiles each of the rising scores is in; equal scores are in one, so some are empty."""
    edges = ranked[np.arange(1, SCORE_LEVELS) * ranked.size // SCORE_LEVELS]
    starts = np.searchsorted(ranked, np.unique(edges))
    return np.repeat(np.arange(starts.size + 1), np.diff(starts, prepend=0, append=ranked.size))
