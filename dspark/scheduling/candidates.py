"""The drafted tokens of a step in the order in which schedulers consider them, and how many of them may be admitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.errors import DataError
from dspark.scheduling.cost import StepCost
from dspark.scheduling.survival import Floats

Integers = NDArray[np.intp]
_FORBIDDEN = -1.0  # below every survival


@dataclass(frozen=True)
class Candidates:
    """All (request, position) pairs that may be verified.

    Attributes:
        values: their survival, falling, [candidates].
        table: the survival of every position, -1 where it may not be verified, [gamma, requests].
    """

    values: Floats
    table: Floats

    @property
    def requests(self) -> int:
        """R, those without a candidate included."""
        return int(self.table.shape[1])

    def tau(self, most: int) -> Floats:
        """Expected tokens of the step with the first 0, 1, .. `most` candidates, bonus tokens included, [most + 1]."""
        tokens = np.empty(most + 1)
        tokens[0] = self.requests
        tokens[1:] = self.values[:most]
        return np.cumsum(tokens, out=tokens)

    def take(self, count: int) -> Integers:
        """How many of the first `count` candidates each request owns, [requests]: its verification length.

        Pairs need not be sorted for it: whatever survives more probably than the last of them is among them, and of
        what survives as probably the first ones are, by position, then request.
        """
        if count == 0:
            return np.zeros(self.requests, dtype=np.intp)
        last = self.values[count - 1]
        taken = self.table > last
        equal = np.flatnonzero(self.table == last)
        np.put(taken, equal[: count - np.count_nonzero(taken)], True)
        lengths: Integers = taken.sum(axis=0)
        return lengths


def rank(survival: ArrayLike, gamma: int, caps: ArrayLike | None = None) -> Candidates:
    """Order the candidates of one step: falling survival, then position, then request.

    Args and errors as in `PrefixScheduler.plan`.
    """
    values = np.asarray(survival, dtype=np.float64)
    if values.shape[:1] == (0,):
        values = values.reshape(0, gamma)
    if values.ndim != 2 or values.shape[1] != gamma:
        raise DataError(f"survival has shape {values.shape}, expected [requests, {gamma}]")
    table = values.T.copy()  # one row per position: the running minimum and the order of ties go by rows
    # The extremes of what holds NaN are NaN, which is neither.
    if table.size and not (table.min() >= 0 and table.max() <= 1):
        raise DataError("survival holds values that are not probabilities (outside [0, 1], or NaN)")
    np.minimum.accumulate(table, axis=0, out=table)
    count = table.size
    if caps is not None:
        limits = np.asarray(caps)
        if limits.shape != table.shape[1:]:
            raise DataError(f"caps have shape {limits.shape}, expected [{table.shape[1]}]")
        beyond = np.arange(gamma)[:, None] >= limits
        table[beyond] = _FORBIDDEN
        count -= int(np.count_nonzero(beyond))
    return Candidates(np.sort(table, axis=None)[::-1][:count], table)


def budget_limit(cost: StepCost, requests: int, candidates: int, max_budget: int | None) -> int:
    """The most draft tokens that one step may verify: candidates, the engine's largest batch, the budget."""
    room = max(cost.max_batch_tokens - requests, 0)
    return min(candidates, room, candidates if max_budget is None else max_budget)
