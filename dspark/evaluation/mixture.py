"""Which mixture of the certified domains would explain what a server accepts, if any would.

A pooled tau is the mean of the domains' weighted with their shares of the steps, and so is survival at each place: what
lies outside the range of the domains is no mixture of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dspark.evaluation.results import Acceptance, Model
from dspark.measured import Measured

_STEPS = 4000  # of the search; its error falls with their number, and it takes milliseconds
_SHOWN = 0.005  # smaller shares are left out


class Mixture(Model):
    """What the certified domains have to say about a live tau."""

    range: tuple[float, float]  # of the domains' tau, their intervals included
    inside: Literal["yes", "above", "below"]  # whether some mixture of them could have the live tau
    shares: dict[str, float] = Field(
        default_factory=dict
    )  # of the steps, in the mixture that comes nearest; only where one could


def explain(tau: Measured, survival: Sequence[float] | None, domains: Mapping[str, Acceptance]) -> Mixture:
    """The mixture of domains that comes nearest to a live tau, and to survival by place where it is known.

    Args:
        tau: live.
        survival: of drafts up to each place, as a share of the steps; None: the engine does not say.
        domains: certified, at least one.
    """
    low = min(one.tau.ci95[0] for one in domains.values())
    high = max(one.tau.ci95[1] for one in domains.values())
    if tau.ci95[1] < low or tau.ci95[0] > high:
        return Mixture(range=(low, high), inside="below" if tau.ci95[1] < low else "above")
    places = 0 if survival is None else min(len(survival), *(len(one.marginal) for one in domains.values()))
    corners = np.array([[one.tau.value, *(rate.value for rate in one.marginal[:places])] for one in domains.values()])
    shares = _nearest(corners, np.array([tau.value, *(survival or ())[:places]]))
    told = {name: round(float(share), 2) for name, share in zip(domains, shares, strict=True) if share >= _SHOWN}
    return Mixture(range=(low, high), inside="yes", shares=told)


def _nearest(corners: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights, positive and of sum 1, of the mean of corners that is nearest to a point (Frank and Wolfe).

    Args:
        corners: [corners, coordinates].
        point: [coordinates].
    """
    weights = np.full(len(corners), 1 / len(corners))
    for _ in range(_STEPS):
        gap = weights @ corners - point
        slopes = corners @ gap
        # Away from the worst corner that has weight, towards the best one: exact line search between the two.
        best = int(slopes.argmin())
        worst = int(np.where(weights > 0, slopes, -np.inf).argmax())
        direction = corners[best] - corners[worst]
        length = float(direction @ direction)
        if slopes[worst] - slopes[best] < 1e-12 or length == 0:
            break
        step = min(float(weights[worst]), float(-(gap @ direction)) / length)
        weights[best] += step
        weights[worst] -= step
    return weights
