"""The delayed prefix scheduler: capacity from two steps ago, tokens from now (DSpark, section 5.2).

The capacity K of a step is the best point of the *whole* curve, which may be jagged, computed from confidences two
steps old; the current survivals only decide which K tokens fill it. Losslessness: K is fixed before the block is
drafted, and a token is among the K best iff fewer than K candidates come before it in the order, none of which is a
later token of its own request. Knowing K early also fixes the batch size before the step (CUDA graphs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from dspark.errors import DataError, SettingsError
from dspark.scheduling.cost import StepCost
from dspark.scheduling.prefix import Integers, Plan, PrefixScheduler, budget_limit, rank
from dspark.scheduling.survival import Floats


class DelayedPrefixScheduler(PrefixScheduler):
    """A prefix scheduler with a memory: one instance serves one running engine, one call per step.

    Args:
        lag: steps between the confidences that size a step and the step itself, at least 1.
        The others as for `PrefixScheduler`; the capacity maximises theta(b) / (1 + min_predicted_gain / R)^b, which
        asks the same gain of each token as the early stop does.
    """

    def __init__(
        self,
        cost: StepCost,
        gamma: int,
        temperatures: ArrayLike | None = None,
        *,
        lag: int = 2,
        min_budget: int = 0,
        max_budget: int | None = None,
        min_predicted_gain: float = 0.0,
    ) -> None:
        super().__init__(
            cost,
            gamma,
            temperatures,
            min_budget=min_budget,
            max_budget=max_budget,
            min_predicted_gain=min_predicted_gain,
        )
        if lag < 1:
            raise SettingsError(f"lag must be at least 1 step, got {lag}: confidences of this step are not lossless")
        self.lag = lag
        self._history: deque[dict[Hashable, Floats]] = deque(maxlen=lag)

    @classmethod
    def of(cls, scheduler: PrefixScheduler, *, lag: int = 2) -> DelayedPrefixScheduler:
        """The delayed scheduler with the cost, temperatures and budgets of another one."""
        return cls(
            scheduler.cost,
            scheduler.gamma,
            scheduler.temperatures,
            lag=scheduler.lag if isinstance(scheduler, DelayedPrefixScheduler) else lag,
            min_budget=scheduler.min_budget,
            max_budget=scheduler.max_budget,
            min_predicted_gain=scheduler.min_predicted_gain,
        )

    def forget(self) -> None:
        """Begin anew, as if no step had been planned."""
        self._history.clear()

    def capacity(self, survival: ArrayLike) -> int:
        """The budget with the highest predicted tokens per second over all budgets; the smallest of equal ones.

        Args:
            survival: of an *earlier* step, or 1 where nothing is known, [requests, gamma].
        """
        candidates = rank(survival, self.gamma)
        requests = candidates.requests
        upper = budget_limit(self.cost, requests, candidates.values.size, self.max_budget)
        lower = min(self.min_budget, upper)
        budgets = np.arange(lower, upper + 1)
        tau = np.cumsum(np.concatenate(([float(requests)], candidates.values)))[budgets]
        hurdle = 1.0 + self.min_predicted_gain / max(requests, 1)
        theta = tau * self.cost.rate(requests, requests + budgets)
        return int(budgets[np.argmax(theta / hurdle**budgets)])

    def step(
        self, survival: ArrayLike, requests: Sequence[Hashable] | None = None, caps: ArrayLike | None = None
    ) -> Plan:
        """Plan one step and remember its confidences.

        Args:
            survival: of the current block, [requests, gamma].
            requests: an id per row, so that rows are found again `lag` steps later; None: row numbers. A request that
                was not there counts as survival 1, as in SGLang.
            caps: as in `PrefixScheduler.plan`.
        """
        candidates = rank(survival, self.gamma, caps)
        current = np.asarray(survival, dtype=np.float64).reshape(-1, self.gamma)
        ids: Sequence[Hashable] = range(len(current)) if requests is None else requests
        if len(ids) != len(current) or len(set(ids)) != len(ids):
            raise DataError(f"{len(current)} rows of survival need as many different request ids, got {list(ids)}")
        old = self._history[0] if len(self._history) == self.lag else {}
        unknown = np.ones(self.gamma)
        known = np.array([old.get(name, unknown) for name in ids]).reshape(-1, self.gamma)
        admitted = min(self.capacity(known), candidates.values.size)
        self._history.append({name: current[row].copy() for row, name in enumerate(ids)})
        running = len(current)
        tau = running + float(candidates.values[:admitted].sum())
        return Plan(
            candidates.take(admitted),
            tau * float(self.cost.rate(running, running + admitted)),
            running * float(self.cost.rate(running, running)),
        )

    def lengths(self, survival: ArrayLike, caps: ArrayLike | None = None) -> Integers:
        """`step(survival, caps=caps).lengths`, rows being the same requests at every step."""
        return self.step(survival, caps=caps).lengths
