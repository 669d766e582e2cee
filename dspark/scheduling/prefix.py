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
from numpy.typing import ArrayLike, NDArray

from dspark.errors import DataError, SettingsError
from dspark.scheduling.cost import StepCost
from dspark.scheduling.survival import Floats, check_temperatures, prefix_survival

Integers = NDArray[np.intp]


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
        requests = candidates.requests
        tokens = requests + np.arange(candidates.values.size + 1)
        tau = np.cumsum(np.concatenate(([float(requests)], candidates.values)))  # tau after b admissions, [1 + all]
        theta = tau * self.cost.rate(requests, tokens)
        upper = budget_limit(self.cost, requests, candidates.values.size, self.max_budget)
        lower = min(self.min_budget, upper)
        hurdle = 1.0 + self.min_predicted_gain / max(requests, 1)
        losing = np.flatnonzero(theta[lower + 1 : upper + 1] <= theta[lower:upper] * hurdle)
        admitted = lower + int(losing[0]) if losing.size else upper
        return Plan(candidates.take(admitted), float(theta[admitted]), float(theta[0]))


@dataclass(frozen=True)
class Candidates:
    """All (request, position) pairs that may be verified, in the order in which they are considered."""

    values: Floats  # survival, falling, [candidates]
    owners: Integers  # the request of each, [candidates]
    requests: int

    def take(self, count: int) -> Integers:
        """How many of the first `count` candidates each request owns, [requests]: its verification length."""
        return np.bincount(self.owners[:count], minlength=self.requests)


def rank(survival: ArrayLike, gamma: int, caps: ArrayLike | None = None) -> Candidates:
    """Order the candidates of one step: falling survival, then position, then request.

    Args and errors as in `PrefixScheduler.plan`.
    """
    values = np.asarray(survival, dtype=np.float64)
    if values.shape[:1] == (0,):
        values = values.reshape(0, gamma)
    if values.ndim != 2 or values.shape[1] != gamma:
        raise DataError(f"survival has shape {values.shape}, expected [requests, {gamma}]")
    if not ((values >= 0) & (values <= 1)).all():
        raise DataError("survival holds values that are not probabilities (outside [0, 1], or NaN)")
    requests = values.shape[0]
    # Position-major and stable: equal survival is then ordered by position first, by request second.
    flat = np.minimum.accumulate(values, axis=1).T.ravel()
    order = np.argsort(-flat, kind="stable")
    if caps is not None:
        limits = np.asarray(caps)
        if limits.shape != (requests,):
            raise DataError(f"caps have shape {limits.shape}, expected [{requests}]")
        order = order[order // max(requests, 1) < limits[order % max(requests, 1)]]
    return Candidates(flat[order], order % max(requests, 1), requests)


def budget_limit(cost: StepCost, requests: int, candidates: int, max_budget: int | None) -> int:
    """The most draft tokens that one step may verify: candidates, the engine's largest batch, the budget."""
    room = max(cost.max_batch_tokens - requests, 0)
    return min(candidates, room, candidates if max_budget is None else max_budget)
