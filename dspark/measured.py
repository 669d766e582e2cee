"""A measured number: its value, how many observations it rests on and its 95 % interval.

Intervals come from the bootstrap over independent units (prompts, rounds), never over tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Array = NDArray[np.float64]


class Measured(BaseModel):
    """`{value, n, ci95: [lo, hi]}` (architecture.md, section 5). The unit stands in the name of the field it fills."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    value: float
    n: int
    ci95: tuple[float, float]

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.ci95[0]:.3f}, {self.ci95[1]:.3f}] (n={self.n})"


def bootstrap(
    units: int,
    statistic: Callable[[NDArray[np.intp]], float],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Measured | None:
    """Percentile bootstrap of a statistic over `units` independent units.

    Args:
        units: how many units there are.
        statistic: the value computed from an index array into the units, [units]; may return NaN for a resample on
            which it is undefined (such resamples are left out).
        resamples: bootstrap resamples.
        seed: of the resampling.
    Returns:
        the statistic on all units with its 95 % interval, or None if it is undefined on all units.
    """
    if units == 0:
        return None
    value = statistic(np.arange(units))
    if not np.isfinite(value):
        return None
    generator = np.random.default_rng(seed)
    draws = np.array([statistic(generator.integers(0, units, units)) for _ in range(resamples)])
    draws = draws[np.isfinite(draws)]
    low, high = np.percentile(draws, [2.5, 97.5]) if draws.size else (value, value)
    return Measured(value=float(value), n=units, ci95=(float(low), float(high)))


def bootstrap_sums(
    columns: Array, statistic: Callable[[Array], Array], *, resamples: int = 1000, seed: int = 0
) -> Measured | None:
    """`bootstrap` of a statistic that depends on sums over units alone, without a Python call per resample.

    Args:
        columns: what is summed, one row per unit, [units, k].
        statistic: of sums [..., k], the values [...]; NaN where it is undefined.
    Returns:
        None if it is undefined on all units.
    """
    units = len(columns)
    if units == 0:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(columns.sum(axis=0)))
        if not np.isfinite(value):
            return None
        times = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=resamples)
        draws = statistic(times @ columns)
    draws = draws[np.isfinite(draws)]
    low, high = np.percentile(draws, [2.5, 97.5]) if draws.size else (value, value)
    return Measured(value=value, n=units, ci95=(float(low), float(high)))


def ratio_of_sums(numerators: Array, denominators: Array, *, resamples: int = 1000, seed: int = 0) -> Measured | None:
    """A pooled ratio, sum(numerators) / sum(denominators), with its bootstrap interval over units.

    Args:
        numerators, denominators: one pair per unit, [units].
    Returns:
        None if the denominators sum to zero.
    """
    if denominators.sum() == 0:
        return None

    def statistic(chosen: NDArray[np.intp]) -> float:
        below = denominators[chosen].sum()
        return float(numerators[chosen].sum() / below) if below else float("nan")

    return bootstrap(len(numerators), statistic, resamples=resamples, seed=seed)
