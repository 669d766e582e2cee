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
from dspark.scheduling.candidates import Integers, rank
from dspark.scheduling.cost import StepCost
from dspark.scheduling.prefix import Plan, PrefixScheduler
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
        # Of each step the row of every request, and the survival of the rows.
        self._history: deque[tuple[dict[Hashable, int], Floats]] = deque(maxlen=lag)

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
        lower, theta = self._predicted(candidates)
        if self.min_predicted_gain:
            theta /= (1.0 + self.min_predicted_gain / max(candidates.requests, 1)) ** np.arange(theta.size)
        return lower + int(np.argmax(theta[lower:]))

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
        current = np.array(survival, dtype=np.float64).reshape(-1, self.gamma)
        ids: Sequence[Hashable] = range(len(current)) if requests is None else requests
        rows = {name: row for row, name in enumerate(ids)}
        if len(ids) != len(current) or len(rows) != len(ids):
            raise DataError(f"{len(current)} rows of survival need as many different request ids, got {list(ids)}")
        admitted = min(self.capacity(self._known(rows)), candidates.values.size)
        self._history.append((rows, current))
        running = len(current)
        rate = self._rate(running)
        return Plan(
            candidates.take(admitted),
            float(candidates.tau(admitted)[-1] * rate[admitted]),
            float(running * rate[0]),
        )

    def _known(self, rows: dict[Hashable, int]) -> Floats:
        """The survival of these requests `lag` steps ago, 1 where they were not there, [requests, gamma]."""
        if len(self._history) < self.lag:
            return np.ones((len(rows), self.gamma))
        before, survival = self._history[0]
        if before == rows:
            return survival
        found = [before.get(name, -1) for name in rows]
        return np.concatenate([survival, np.ones((1, self.gamma))])[found]  # -1 is the last row

    def lengths(self, survival: ArrayLike, caps: ArrayLike | None = None) -> Integers:
        """`step(survival, caps=caps).lengths`, rows being the same requests at every step."""
        return self.step(survival, caps=caps).lengths
