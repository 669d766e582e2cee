"""How well stated probabilities match what happened: ECE, AUROC, Brier score, reliability tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.errors import CalibrationError

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
Flags = NDArray[np.bool_]
Binning = Literal["width", "mass"]


def bin_index(probabilities: Floats, bins: int, binning: Binning = "width") -> Integers:
    """The bin of each probability, [n], in 0..bins-1.

    Args:
        binning: `width`: equal intervals of [0, 1], 1 in the last one. `mass`: quantiles of these probabilities (at
            least one); equal values share a bin, so with many ties some bins are empty.
    """
    if binning == "width":
        return np.minimum((probabilities * bins).astype(np.intp), bins - 1)
    return np.searchsorted(mass_edges(np.sort(probabilities), bins), probabilities, side="right").astype(np.intp)


def mass_edges(rising: Floats, bins: int) -> Floats:
    """What parts sorted values into as many of about the same number, [bins - 1]: their quantiles, interpolated."""
    places = np.arange(1, bins) * ((rising.size - 1) / bins)
    below = places.astype(np.intp)
    edges: Floats = rising[below] + (places - below) * (rising[np.minimum(below + 1, rising.size - 1)] - rising[below])
    return edges


def bin_gaps(
    probabilities: Floats, outcomes: ArrayLike, bins: int, groups: Integers, count: int, binning: Binning = "width"
) -> Floats:
    """sum(probability - outcome) per group of rows and bin, [groups, bins].

    Sums over any multiset of groups give the ECE of that multiset, which makes resampling whole conversations cheap.
    """
    return cell_gaps(probabilities, outcomes, bin_index(probabilities, bins, binning), bins, groups, count)


def cell_gaps(
    probabilities: Floats, outcomes: ArrayLike, index: Integers, bins: int, groups: Integers, count: int
) -> Floats:
    """As `bin_gaps`, with the bin of each row given, [n]."""
    cells = groups * bins + index
    gaps = probabilities - np.asarray(outcomes, dtype=np.float64)
    return np.bincount(cells, weights=gaps, minlength=count * bins).astype(np.float64).reshape(count, bins)


def ece(probabilities: ArrayLike, outcomes: ArrayLike, bins: int = 15, binning: Binning = "width") -> float:
    """Expected calibration error: sum over bins of n_b/n * |mean probability - mean outcome|, in [0, 1].

    It is biased upwards by noise: a calibrated forecast scores about 0.8 * sum_b sqrt(n_b p(1-p)) / n, not 0.

    Raises:
        CalibrationError: no rows, lengths that differ, probabilities outside [0, 1].
    """
    values, happened = _check(probabilities, outcomes)
    gaps = bin_gaps(values, happened, bins, np.zeros(values.size, dtype=np.intp), 1, binning)
    return float(np.abs(gaps).sum() / values.size)


def brier(probabilities: ArrayLike, outcomes: ArrayLike) -> float:
    """Mean squared difference of probability and outcome.

    Raises:
        CalibrationError: as `ece`.
    """
    values, happened = _check(probabilities, outcomes)
    return float(np.mean((values - happened) ** 2))


def auroc(scores: ArrayLike, outcomes: ArrayLike) -> float | None:
    """Probability that a case that happened scores above one that did not; ties count one half.

    Returns:
        None if only one of the two outcomes occurred.
    Raises:
        CalibrationError: no rows or lengths that differ.
    """
    values = np.asarray(scores, dtype=np.float64)
    happened = np.asarray(outcomes, dtype=bool)
    _check_lengths(values, happened)
    order = np.argsort(values)
    return sorted_auroc(values[order], happened[order])


def sorted_auroc(scores: Floats, happened: Flags) -> float | None:
    """As `auroc`, of cases by rising score; at least one."""
    positives = int(np.count_nonzero(happened))
    negatives = happened.size - positives
    if positives == 0 or negatives == 0:
        return None
    starts = np.flatnonzero(np.concatenate(([True], scores[1:] != scores[:-1])))  # of equal scores
    counts = np.diff(np.append(starts, scores.size))
    middle_rank = starts + (counts + 1) / 2  # ranks from 1
    rank_sum = float(middle_rank @ np.add.reduceat(happened, starts, dtype=np.int64))
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


@dataclass(frozen=True)
class ReliabilityBin:
    """One bar of a reliability diagram: probabilities in [low, high) (the last bin includes 1)."""

    low: float
    high: float
    count: int
    mean_confidence: float
    accepted_rate: float


def reliability_table(probabilities: ArrayLike, outcomes: ArrayLike, bins: int = 15) -> list[ReliabilityBin]:
    """The bins of equal width that hold anything.

    Raises:
        CalibrationError: as `ece`.
    """
    values, happened = _check(probabilities, outcomes)
    index = bin_index(values, bins)
    counts = np.bincount(index, minlength=bins)
    confidence = np.bincount(index, weights=values, minlength=bins)
    rate = np.bincount(index, weights=happened, minlength=bins)
    return [
        ReliabilityBin(b / bins, (b + 1) / bins, int(counts[b]), confidence[b] / counts[b], rate[b] / counts[b])
        for b in range(bins)
        if counts[b]
    ]


def _check(probabilities: ArrayLike, outcomes: ArrayLike) -> tuple[Floats, Floats]:
    values = np.asarray(probabilities, dtype=np.float64)
    happened = np.asarray(outcomes, dtype=np.float64)
    _check_lengths(values, happened)
    if not ((values >= 0) & (values <= 1)).all():
        raise CalibrationError("probabilities must lie in [0, 1]")
    return values, happened


def _check_lengths(values: NDArray[np.generic], happened: NDArray[np.generic]) -> None:
    if values.ndim != 1 or values.shape != happened.shape or values.size == 0:
        raise CalibrationError(
            f"one outcome per probability is needed and at least one of them, got {values.shape} and {happened.shape}"
        )
