"""The hardware-aware prefix scheduler with early stop: Algorithm 1 of DSpark, section 3.2.2.

Losslessness. Whether token k of a request is verified must not depend on that token's value or on anything computed
from it, which is all confidences behind position k. The walk goes through candidates by falling survival; because
survival never rises along a block, everything that comes before (r, k) in the walk, and so everything that its
admission depends on, was computed from tokens before x_{r,k}. Stopping at the first candidate that does not pay keeps
it so; looking at the whole curve and going back to its best point does not (appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dspark.errors import SettingsError
from dspark.scheduling.candidates import Candidates, Integers, budget_limit, rank
from dspark.scheduling.cost import StepCost
from dspark.scheduling.survival import Floats, check_temperatures, prefix_survival

_REMEMBERED = 64  # numbers of requests whose rates are kept: concurrency moves slowly


@dataclass(frozen=True)
class Plan:
    """What one step will verify, and what the cost model predicts for it."""

    lengths: Integers  # draft tokens to verify of each request, [requests]; the bonus token is not counted
    tokens_per_second: float  # predicted with these lengths: tau * SPS at R requests and B tokens
    tokens_per_second_without: float  # predicted with no draft verified: R * SPS at R requests and R tokens

    @property
    def budget(self) -> int:
        """Draft tokens verified in this step, all requests together."""
        return int(self.lengths.sum())


class PrefixScheduler:
    """Chooses how many drafted tokens of each request are verified, so that predicted tokens per second rise.

    Args:
        cost: the engine's steps per second against tokens per step (R bonus tokens and the admitted drafts): a
            `CostCurve`, or an `AdditiveCost`, which tells what requests cost from what tokens cost.
        gamma: block size.
        temperatures: of the confidence head, [gamma]; None: 1 everywhere.
        min_budget: admit at least so many draft tokens per step (as far as there are candidates), whatever the cost
            says: a count fixed beforehand, so nothing in the block can influence it.
        max_budget: admit at most so many per step: the walk ends early, by its count alone.
        min_predicted_gain: relative gain g that one more draft token *per request* must bring: a candidate is
            admitted iff theta > (1 + g / R) * best, with g = 0 Algorithm 1 to the letter. It is asked of every
            admission as the walk comes to it; dropping a finished plan because its total gain is too small would look
            past the first token and is not lossless.
    Raises:
        CalibrationError: temperatures that are not one positive number per position.
        SettingsError: a budget or gain that makes no sense.
    """

    def __init__(
        self,
        cost: StepCost,
        gamma: int,
        temperatures: ArrayLike | None = None,
        *,
        min_budget: int = 0,
        max_budget: int | None = None,
        min_predicted_gain: float = 0.0,
    ) -> None:
        if gamma < 1:
            raise SettingsError(f"gamma must be at least 1, got {gamma}")
        if min_budget < 0 or (max_budget is not None and max_budget < min_budget):
            raise SettingsError(f"budgets must satisfy 0 <= min <= max, got min {min_budget} and max {max_budget}")
        if not 0 <= min_predicted_gain < np.inf:
            raise SettingsError(f"min_predicted_gain must be >= 0, got {min_predicted_gain}")
        self.cost = cost
        self.gamma = gamma
        self.temperatures = check_temperatures(np.ones(gamma) if temperatures is None else temperatures, gamma)
        self.min_budget = min_budget
        self.max_budget = max_budget
        self.min_predicted_gain = min_predicted_gain
        self._rates: dict[int, Floats] = {}

    def survival(self, confidence_logits: ArrayLike) -> Floats:
        """Calibrated prefix survival of raw confidence logits, [requests, gamma]; see `prefix_survival`."""
        return prefix_survival(confidence_logits, self.temperatures)

    def lengths(self, survival: ArrayLike, caps: ArrayLike | None = None) -> Integers:
        """How many draft tokens of each request to verify, [requests], each in 0..gamma; see `plan`."""
        return self.plan(survival, caps).lengths

    def plan(self, survival: ArrayLike, caps: ArrayLike | None = None) -> Plan:
        """Run Algorithm 1 on one step.

        Candidates are ordered by falling survival, then position, then request. None of these tie-breaks looks at a
        later confidence, and no candidate comes before an earlier position of its own request.

        Args:
            survival: a[r, j], probabilities, [requests, gamma]. A value above an earlier one of its row, which no
                product of probabilities has, counts as that earlier one (a running minimum looks backwards only).
            caps: at most so many tokens of each request, [requests]. They must be known before the block is drafted
                (a stop length, a user's limit); a cap computed from the block's own tokens breaks losslessness.
        Raises:
            DataError: shapes that do not fit, or survival outside [0, 1].
        """
        candidates = rank(survival, self.gamma, caps)
        lower, theta = self._predicted(candidates)
        hurdle = 1.0 + self.min_predicted_gain / max(candidates.requests, 1)
        losing = np.flatnonzero(theta[lower + 1 :] <= theta[lower:-1] * hurdle)
        admitted = lower + int(losing[0]) if losing.size else theta.size - 1
        return Plan(candidates.take(admitted), float(theta[admitted]), float(theta[0]))

    def _predicted(self, candidates: Candidates) -> tuple[int, Floats]:
        """The least budget of a step, and the tokens per second of every one that is possible, [1 + largest]."""
        requests = candidates.requests
        upper = budget_limit(self.cost, requests, candidates.values.size, self.max_budget)
        return min(self.min_budget, upper), candidates.tau(upper) * self._rate(requests)[: upper + 1]

    def _rate(self, requests: int) -> Floats:
        """Steps per second with every number of drafts beside so many requests; asked once, as costs do not change."""
        if requests not in self._rates:
            if len(self._rates) == _REMEMBERED:
                self._rates.clear()
            most = budget_limit(self.cost, requests, requests * self.gamma, None)
            self._rates[requests] = self.cost.rate(requests, requests + np.arange(most + 1))
        return self._rates[requests]
