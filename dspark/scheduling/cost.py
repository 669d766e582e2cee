"""What a step costs: of any model, and the cost curve, steps per second against tokens, SPS(B) of DSpark, 3.2.2."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from dspark.errors import CostCurveError
from dspark.io.jsonfile import validation_text

Floats = NDArray[np.float64]
Lookup = Literal["floor", "linear", "ceiling"]


def _whole(value: Any) -> int:
    """A JSON integer or a NumPy one; 8.0, "8" and true are not (SGLang refuses them too)."""
    if isinstance(value, bool):
        raise ValueError("must be a whole number, not a truth value")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"must be a whole number, got {value!r}") from None


Tokens = Annotated[int, BeforeValidator(_whole)]


class StepCost(Protocol):
    """What schedulers ask of a model of step times."""

    @property
    def max_batch_tokens(self) -> int:
        """The largest step that it speaks of; schedulers never go beyond it."""
        ...

    def rate(self, requests: int, tokens: ArrayLike) -> Floats:
        """Steps per second with that many requests, at each number of tokens per step (requests + drafts to verify)."""
        ...


class CostCurve(BaseModel):
    """SPS at probed batch sizes; every curve in existence is one that a scheduler can use.

    Between probes engines differ, and so does `lookup`: `floor` takes the last probe at or below the batch, as SGLang
    does; `linear` the time on the straight line between two probes, for engines that run every size as it is; `ceiling`
    the next probe at or above it, for engines that pad a step to the next captured size, which the probes then are.
    Below the first probe all take its value, above the last one the last value. `max_batch_tokens` is the largest step
    that the engine runs, and schedulers never go beyond it. Past the last probe the curve promises tokens for nothing,
    as SGLang's does: probe up to `max_batch_tokens`, as profiles do, or set it to the last probe.

    Raises:
        CostCurveError: on construction, from values or from a file: no or one probe; tokens that are not whole,
            positive and strictly increasing; steps per second that are not positive and finite, that rise anywhere
            (noise; the message says where), or that are all equal (verification would look free, so every draft would
            be verified and the scheduler be off without anyone noticing).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sample_batch_tokens: tuple[Tokens, ...]
    sample_steps_per_second: tuple[float, ...]
    max_batch_tokens: Tokens
    # Not written where it is what files without it mean.
    lookup: Lookup = Field(default="floor", exclude_if=lambda lookup: lookup == "floor")

    @model_validator(mode="wrap")
    @classmethod
    def _usable(cls, value: Any, handler: ModelWrapValidatorHandler[CostCurve]) -> CostCurve:
        try:
            curve = handler(value)
        except ValidationError as reason:
            raise CostCurveError(f"cost curve: {validation_text(reason)}") from None
        _check(curve.sample_batch_tokens, curve.sample_steps_per_second, curve.max_batch_tokens)
        return curve

    @cached_property
    def _probes(self) -> tuple[NDArray[np.int64], Floats]:
        return np.array(self.sample_batch_tokens, dtype=np.int64), np.array(self.sample_steps_per_second)

    def steps_per_second(self, tokens: ArrayLike) -> Floats:
        """SPS at a number of tokens per step, elementwise."""
        probes, rates = self._probes
        batch = np.asarray(tokens)
        result: Floats
        if self.lookup == "linear":
            result = 1.0 / np.interp(batch, probes, 1.0 / rates)
        elif self.lookup == "ceiling":
            result = rates[np.minimum(np.searchsorted(probes, batch), rates.size - 1)]
        else:
            result = rates[np.maximum(np.searchsorted(probes, batch, side="right") - 1, 0)]
        return result

    def rate(self, requests: int, tokens: ArrayLike) -> Floats:
        """As `steps_per_second`: the curve does not know requests."""
        return self.steps_per_second(tokens)

    def step_seconds(self, tokens: ArrayLike) -> Floats:
        """Seconds of one step, elementwise: 1 / SPS."""
        return 1.0 / self.steps_per_second(tokens)


@dataclass(frozen=True)
class DraftedCost:
    """A cost of verification with drafting added, for engines that time the two apart, as vLLM does.

    Drafting is paid for before it is known how much will be verified. It makes each verified token a smaller part of
    the step, so that more of them pay.

    Attributes:
        verification: what steps cost without drafting.
        requests: probed numbers of requests, increasing.
        draft_seconds: of a step, at each of them; between probes on the straight line, beyond them the ends.
    Raises:
        CostCurveError: probes that do not increase, or seconds that are negative, not finite or not one per probe.
    """

    verification: StepCost
    requests: tuple[int, ...]
    draft_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.requests or len(self.requests) != len(self.draft_seconds):
            raise CostCurveError(
                f"draft cost: {len(self.requests)} numbers of requests but {len(self.draft_seconds)} times"
            )
        if any(after <= before for before, after in itertools.pairwise(self.requests)):
            raise CostCurveError(f"draft cost: requests must strictly increase, they are {list(self.requests)}")
        for requests, seconds in zip(self.requests, self.draft_seconds, strict=True):
            if not 0 <= seconds < math.inf:
                raise CostCurveError(f"draft cost: {seconds:g} seconds at {requests} requests, it must be >= 0")

    @property
    def max_batch_tokens(self) -> int:
        """That of verification."""
        return self.verification.max_batch_tokens

    def rate(self, requests: int, tokens: ArrayLike) -> Floats:
        """Steps per second, drafting included, with that many requests, at each number of tokens per step."""
        drafting = np.interp(requests, self.requests, self.draft_seconds)
        result: Floats = 1.0 / (1.0 / self.verification.rate(requests, tokens) + drafting)
        return result


@dataclass(frozen=True)
class Change:
    """One probe that a repair moved."""

    tokens: int
    steps_per_second_before: float
    steps_per_second_after: float

    def __str__(self) -> str:
        relative = self.steps_per_second_after / self.steps_per_second_before - 1
        return (
            f"{self.tokens} tokens: {self.steps_per_second_before:g} -> {self.steps_per_second_after:g} "
            f"steps/s ({relative:+.1%})"
        )


@dataclass(frozen=True)
class IsotonicRepair:
    """Steps per second that never rise, and what had to be changed for it."""

    steps_per_second: tuple[float, ...]
    changes: tuple[Change, ...]

    @property
    def largest_change(self) -> float:
        """Largest relative change of one probe, 0 if nothing rose; a large one means: measure again."""
        ratios = [abs(change.steps_per_second_after / change.steps_per_second_before - 1) for change in self.changes]
        return max(ratios, default=0.0)


def isotonic(
    tokens: Sequence[int], steps_per_second: Sequence[float], weights: Sequence[float] | None = None
) -> IsotonicRepair:
    """Flatten rises of a measured curve: the closest step times (weighted least squares) that never fall with tokens.

    A rise of SPS with more tokens is measurement noise. Runs of probes that contradict each other get their mean step
    time, because step times are what was measured. `CostCurve` never does this by itself: whoever calls it shows the
    changes, and repeats the measurement if they are large.

    Args:
        tokens: probed tokens per step, strictly increasing.
        steps_per_second: measured at each of them, > 0.
        weights: how much each probe counts, for example its repeats; None: all the same.
    Raises:
        CostCurveError: if the lists do not match, tokens do not increase, or a rate or weight is not positive.
    """
    counts = [1.0] * len(tokens) if weights is None else list(weights)
    if not len(tokens) == len(steps_per_second) == len(counts):
        raise CostCurveError(
            f"cost curve: {len(tokens)} token counts, {len(steps_per_second)} rates and {len(counts)} weights"
        )
    _check_increasing(tokens)
    _check_positive(tokens, steps_per_second)
    if not all(weight > 0 for weight in counts):
        raise CostCurveError("cost curve: weights must be > 0")
    # Pool adjacent violators: blocks of (mean seconds, weight, probes), merged backwards while they would fall.
    blocks: list[tuple[float, float, int]] = []
    for rate, weight in zip(steps_per_second, counts, strict=True):
        block = (1.0 / rate, float(weight), 1)
        while blocks and block[0] < blocks[-1][0]:
            seconds, heavier, probes = blocks.pop()
            total = heavier + block[1]
            block = ((seconds * heavier + block[0] * block[1]) / total, total, probes + block[2])
        blocks.append(block)
    repaired: list[float] = []
    for seconds, _, probes in blocks:
        # A probe that stands alone keeps its measured value to the last bit.
        repaired += [steps_per_second[len(repaired)]] if probes == 1 else [1.0 / seconds] * probes
    changes = tuple(
        Change(int(count), float(before), float(after))
        for count, before, after in zip(tokens, steps_per_second, repaired, strict=True)
        if before != after
    )
    return IsotonicRepair(tuple(float(rate) for rate in repaired), changes)


def _check(tokens: Sequence[int], rates: Sequence[float], max_batch_tokens: int) -> None:
    if len(tokens) != len(rates):
        raise CostCurveError(f"cost curve: {len(tokens)} token counts but {len(rates)} rates")
    if len(tokens) < 2:
        raise CostCurveError(
            f"cost curve: {len(tokens)} probe(s), at least 2 are needed: engines take such a table for none at all",
            "profile at more batch sizes",
        )
    _check_increasing(tokens)
    if tokens[0] <= 0:
        raise CostCurveError(f"cost curve: token counts must be > 0, the first is {tokens[0]}")
    _check_positive(tokens, rates)
    if max_batch_tokens < tokens[-1]:
        raise CostCurveError(f"cost curve: max_batch_tokens {max_batch_tokens} is below the last probe {tokens[-1]}")
    points = list(zip(tokens, rates, strict=True))
    for (fewer, before), (more, after) in itertools.pairwise(points):
        if after > before:
            raise CostCurveError(
                f"cost curve: steps per second rise from {before:g} at {fewer} tokens to {after:g} at {more} tokens",
                "measurement noise: profile again with more repeats, or repair with dspark.scheduling.isotonic",
            )
    if rates[0] == rates[-1]:
        raise CostCurveError(
            f"cost curve: flat, {rates[0]:g} steps per second at every batch size: the scheduler would verify all",
            "profile up to batch sizes at which the step gets slower",
        )


def _check_increasing(tokens: Sequence[int]) -> None:
    for index, (before, after) in enumerate(itertools.pairwise(tokens)):
        if after <= before:
            raise CostCurveError(
                f"cost curve: token counts must strictly increase, probe {index + 2} is {after} after {before}"
            )


def _check_positive(tokens: Sequence[int], rates: Sequence[float]) -> None:
    for count, rate in zip(tokens, rates, strict=True):
        if not (math.isfinite(rate) and rate > 0):
            raise CostCurveError(f"cost curve: {rate:g} steps per second at {count} tokens, it must be > 0")
