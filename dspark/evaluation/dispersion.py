"""How much a server's pooled acceptance varies by chance: between the steps of a request, and between requests.

Counters are totals, so that the spread between requests cannot be seen in them; steps of one request are alike, and to
take them for independent ones would raise an alarm every other day. It comes from the records of single prompts that
lie in the evidence, or from the certificate's own intervals, which are over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dspark.decoding.records import RecordSet
from dspark.measured import Measured

# Of the squared coefficient of variation of how many steps requests have: that of an exponential distribution. Records
# cannot tell it, since their replies end at one limit.
LENGTHS = 1.0
Z95 = NormalDist().inv_cdf(0.975)
FEWEST = 6  # independent units that an error can be estimated on

Source = Literal["records", "intervals"]


@dataclass(frozen=True)
class Spread:
    """The variance of a pooled ratio, such as tokens per step.

    Attributes:
        within: variance of one unit (a step, or a block that reached a place) inside a request.
        between: variance of the requests' own expectations.
        prompts: that it was estimated on.
        source: `records` of single prompts, or the `intervals` of a certificate.
    """

    within: float
    between: float
    prompts: int
    source: Source

    def variance(self, units: float, requests: float) -> float:
        """Of the ratio over so many units of so many requests, whose lengths differ (`LENGTHS`)."""
        return self.within / units + self.between * (1 + LENGTHS) / requests


def spread_of_tau(records: RecordSet) -> Spread | None:
    """Of the tokens that a step commits; None: fewer than two prompts have two steps."""
    return _spread([one.cycles.committed.astype(float) for one in records.decoded])


def spread_of_position(records: RecordSet, place: int) -> Spread | None:
    """Of the acceptance at a place, counted from 0, where all places before it were accepted."""
    blocks = []
    for one in records.decoded:
        reached = (one.cycles.accepted >= place) & (one.cycles.known > place)
        blocks.append((one.cycles.accepted[reached] > place).astype(float))
    return _spread(blocks)


def spread_of_interval(number: Measured) -> Spread:
    """What an interval over prompts tells: the whole variance is taken for one between requests."""
    return Spread(0.0, number.n * variance_of(number), number.n, "intervals")


def variance_of(number: Measured) -> float:
    """Of a measured number, from its 95 % interval; resampling n units takes it for (n - 1) / n of what it is."""
    low, high = number.ci95
    return ((high - low) / (2 * Z95)) ** 2 * number.n / max(number.n - 1, 1)


def critical(false_alarms: float, units: int) -> float:
    """How many standard errors chance exceeds, on either side together, with such a probability.

    Student's t with one degree of freedom less than units, on which the error is estimated; by the expansion of
    Abramowitz and Stegun, 26.7.5, which is good to a percent from five degrees on. Fewer decide nothing: infinite.
    """
    if units < FEWEST:
        return math.inf
    z, freedom = NormalDist().inv_cdf(1 - false_alarms / 2), units - 1
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


def _spread(prompts: Iterable[NDArray[np.float64]]) -> Spread | None:
    """Variance components of units in prompts, by moments."""
    told = [units for units in prompts if len(units)]
    several = [units for units in told if len(units) > 1]
    if len(told) < 2 or not several:
        return None
    sizes = np.array([len(units) for units in told], float)
    sums = np.array([units.sum() for units in told])
    within = sum(float(((units - units.mean()) ** 2).sum()) for units in several) / sum(
        len(units) - 1 for units in several
    )
    residuals = (sums - sums.sum() / sizes.sum() * sizes) ** 2 * len(told) / (len(told) - 1)
    between = max(0.0, float((residuals - within * sizes).sum() / (sizes**2).sum()))
    return Spread(float(within), between, len(told), "records")
