"""A cost model of two axes: a step's seconds as a bias, a part of its requests and a part of its tokens.

T(R, m) = bias + alpha(R) + theta(m), with m = R + b tokens of R requests and b drafted ones. A `CostCurve` knows tokens
only: a step of 8 requests and one of 1 request cost it the same if both verify 8 tokens, though the one drafts eight
blocks and reads eight contexts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from dspark.errors import CostCurveError
from dspark.io.jsonfile import validation_text
from dspark.scheduling.cost import Floats, Tokens

FEWEST_CELLS = 4
# Closer probes of tokens would each rest on a single shape, since other numbers of requests come to other multiples.
_APART = 1.5


@dataclass(frozen=True)
class Cell:
    """One measured shape of a step."""

    requests: int
    tokens: int  # of all requests together, anchors included
    seconds: float


class AdditiveCost(BaseModel):
    """Seconds of a step as a sum of two piecewise linear functions; every one in existence is of use to a scheduler.

    Between probes the parts are interpolated, beyond them they keep their last value, as SGLang does. Schedulers do not
    go beyond the last probe of the tokens, where all further ones would look free.

    Raises:
        CostCurveError: on construction, from values or from a file: probes that are not whole, positive and strictly
            increasing; a bias or a step time that is not positive and finite; a part of the tokens that falls anywhere
            (more tokens would look cheaper), or that is the same at all of them (every draft would look free).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    bias_seconds: float
    requests: tuple[Tokens, ...]
    alpha_seconds: tuple[float, ...]
    tokens: tuple[Tokens, ...]
    theta_seconds: tuple[float, ...]

    @model_validator(mode="wrap")
    @classmethod
    def _usable(cls, value: Any, handler: ModelWrapValidatorHandler[AdditiveCost]) -> AdditiveCost:
        try:
            cost = handler(value)
        except ValidationError as reason:
            raise CostCurveError(f"additive cost: {validation_text(reason)}") from None
        _check(cost)
        return cost

    @property
    def max_batch_tokens(self) -> int:
        """The largest step that was measured."""
        return self.tokens[-1]

    def rate(self, requests: int, tokens: ArrayLike) -> Floats:
        """Steps per second with that many requests, at each number of tokens per step."""
        result: Floats = 1.0 / self.seconds(requests, tokens)
        return result

    @cached_property
    def _parts(self) -> tuple[Floats, Floats, Floats, Floats]:
        alpha, theta = np.array(self.alpha_seconds), np.array(self.theta_seconds)
        return np.array(self.requests, np.float64), alpha, np.array(self.tokens, np.float64), theta

    def seconds(self, requests: ArrayLike, tokens: ArrayLike) -> Floats:
        """Seconds of a step, elementwise.

        Args:
            requests: R.
            tokens: m = R + drafted tokens to verify.
        """
        request_probes, alpha, token_probes, theta = self._parts
        of_requests = np.interp(np.asarray(requests, np.float64), request_probes, alpha)
        result: Floats = (
            self.bias_seconds + of_requests + np.interp(np.asarray(tokens, np.float64), token_probes, theta)
        )
        return result


class ModelErrors(BaseModel):
    """How far two cost models are off at measured shapes that they were not fitted to: medians of relative errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cells: int = Field(ge=1)  # left out one at a time
    curve_relative_error: float = Field(ge=0)
    additive_relative_error: float = Field(ge=0)

    @property
    def additive_is_closer(self) -> bool:
        """Whether requests help to predict a step; where they do not, the simpler model is right."""
        return self.additive_relative_error < self.curve_relative_error

    def __str__(self) -> str:
        return (
            f"{self.cells} measured shapes, each left out once, are predicted within {self.curve_relative_error:.1%} "
            f"from tokens alone and within {self.additive_relative_error:.1%} from requests and tokens (medians)"
        )


def fit_additive(cells: Sequence[Cell]) -> AdditiveCost:
    """The additive cost closest to measured steps: least squares of relative errors, under a theta that never falls.

    Both parts are 0 at their first probe. Cells of the same shape count each. Tokens closer together than half as much
    again share probes, so that shapes of 3 and of 4 tokens, or of 5 and 6, tell something about each other.

    Raises:
        CostCurveError: fewer than four shapes, a measured time that is not positive, requests and tokens that do not
            vary apart (their parts could not be told from each other), or a fit that no scheduler can use.
    """
    shapes = {(cell.requests, cell.tokens) for cell in cells}
    if len(shapes) < FEWEST_CELLS:
        raise CostCurveError(f"additive cost: {len(shapes)} shapes of steps, at least {FEWEST_CELLS} are needed")
    for cell in cells:
        if not (math.isfinite(cell.seconds) and cell.seconds > 0):
            raise CostCurveError(
                f"additive cost: {cell.seconds:g} seconds at {cell.requests} requests and {cell.tokens} tokens, "
                "it must be > 0"
            )
    requests = sorted({requests for requests, _ in shapes})
    tokens = _probes(sorted({tokens for _, tokens in shapes}))
    of_requests = np.array([[float(cell.requests == probe) for probe in requests] for cell in cells])
    # Steps of theta instead of its values: that none is negative is all that keeps theta from falling.
    at = np.array([cell.tokens for cell in cells], np.float64)
    rises = (
        np.array([np.interp(at, tokens[k : k + 2], (0.0, 1.0)) for k in range(len(tokens) - 1)]).reshape(-1, at.size).T
    )
    if len(requests) < 2 or np.linalg.matrix_rank(np.hstack([of_requests, rises])) < len(requests) + len(tokens) - 1:
        raise CostCurveError(
            "additive cost: requests and tokens do not vary apart in the measured steps",
            "profile several numbers of verified tokens at each number of requests",
        )
    weights = 1 / np.array([[cell.seconds] for cell in cells])
    base, goal = of_requests * weights, np.ones(len(cells))
    directions, _ = np.linalg.qr(base)
    # What no choice of alpha can explain is left for theta; alpha is then the best one beside that theta.
    steep = rises * weights
    rest = steep - directions @ (directions.T @ steep)
    slopes = _nonnegative(rest, goal - directions @ (directions.T @ goal))
    levels = np.linalg.lstsq(base, goal - steep @ slopes, rcond=None)[0]
    return AdditiveCost(
        bias_seconds=float(levels[0]),
        requests=tuple(requests),
        alpha_seconds=tuple(float(level) for level in levels - levels[0]),
        tokens=tuple(tokens),
        theta_seconds=(0.0, *(float(value) for value in np.cumsum(slopes))),
    )


def _probes(tokens: Sequence[int]) -> list[int]:
    """The first and the last token count and, between them, those that lie far enough apart."""
    kept = [tokens[0]]
    for count in tokens[1:]:
        if count >= _APART * kept[-1]:
            kept.append(count)
    if kept[-1] != tokens[-1]:
        kept = [*(kept[:-1] or kept), tokens[-1]]
    return kept


def _nonnegative(design: Floats, goal: Floats) -> Floats:
    """The x >= 0 that brings `design @ x` closest to `goal`: active sets (Lawson and Hanson, 1974, chapter 23)."""
    size = design.shape[1]
    tolerance = 1e-12 * float(np.abs(design).max(initial=0.0)) * len(goal)  # errors are relative, so 1 is large
    found, free = np.zeros(size), np.zeros(size, bool)
    for _ in range(3 * size):  # enough in practice; each round ends with an x >= 0 that is no worse
        gradient = np.where(free, -np.inf, design.T @ (goal - design @ found))
        if not size or gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(design[:, free], goal, rcond=None)[0]
            blocked = free & (trial <= 0)
            if not blocked.any():
                break
            # Go as far towards the trial as nothing turns negative; what stops the way is fixed at 0.
            ways = np.divide(found, found - trial, out=np.zeros(size), where=blocked & (found > trial))
            first = int(np.where(blocked, ways, np.inf).argmin())
            found = found + ways[first] * (trial - found)
            free[first] = False
            free &= ~(blocked & (found <= 0))
            found[~free] = 0.0
        found = trial
    return found


def _check(cost: AdditiveCost) -> None:
    for axis, probes, values in (
        ("requests", cost.requests, cost.alpha_seconds),
        ("tokens", cost.tokens, cost.theta_seconds),
    ):
        if len(probes) != len(values) or not probes:
            raise CostCurveError(f"additive cost: {len(probes)} probes of {axis} but {len(values)} values")
        if probes[0] <= 0 or any(after <= before for before, after in itertools.pairwise(probes)):
            raise CostCurveError(
                f"additive cost: probes of {axis} must be > 0 and strictly increase, they are {list(probes)}"
            )
    points = list(zip(cost.tokens, cost.theta_seconds, strict=True))
    for (fewer, before), (more, after) in itertools.pairwise(points):
        if after < before:
            raise CostCurveError(
                f"additive cost: {more} tokens would cost less ({after:g} s) than {fewer} ({before:g} s)",
                "measurement noise: profile again with more repeats",
            )
    if cost.theta_seconds[0] == cost.theta_seconds[-1]:
        raise CostCurveError(
            "additive cost: flat, tokens cost nothing: every draft would be verified", "profile at more tokens per step"
        )
    if not cost.bias_seconds > 0:
        raise CostCurveError(f"additive cost: the bias is {cost.bias_seconds:g} seconds, it must be > 0")
    least = cost.bias_seconds + min(cost.alpha_seconds) + cost.theta_seconds[0]
    if not least > 0:
        raise CostCurveError(f"additive cost: the cheapest step would take {least:g} seconds")
