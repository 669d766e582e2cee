"""What a load study came to: predictions, which are on disk before anything is timed, and what was measured then.

No torch import: reports and tables are made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dspark.config.models import DType, LoadSettings, Name
from dspark.decoding.policies import Policy
from dspark.errors import DataError
from dspark.evaluation.frontier import Curves, Gain
from dspark.evaluation.prediction import Prediction, Recorded, StepTimes, predict
from dspark.evaluation.results import Model, ThroughputReport
from dspark.evaluation.rounds import NONE, Comparison, Round, over_prompts
from dspark.measured import Measured

MTP1 = "fixed(1)"  # one draft per step, as a drafter of one token would give: the paper's baseline
BASELINES = (NONE, MTP1)


# ---------------------------------------------------------------- before


class PredictedPoint(Model):
    """One policy at one number of requests."""

    concurrency: int
    arm: str
    predicted: Prediction


class PredictedLoad(Model):
    """`predicted.json`, written before the first round is timed."""

    schema_: Literal["dspark/predicted-load/1"] = Field(default="dspark/predicted-load/1", alias="schema")
    made_at: str  # ISO 8601, UTC
    build: Name
    target: Name
    gamma: int
    settings: LoadSettings
    cost_profile: Name  # whose step times it rests on
    fitted_on: tuple[str, ...]  # prompts whose records it rests on
    measured_on: tuple[str, ...]  # prompts that will be asked, as far as rounds go, none of them among those
    points: tuple[PredictedPoint, ...]


def predict_load(
    recorded: Recorded, policies: Mapping[str, Policy], times: StepTimes, settings: LoadSettings
) -> tuple[PredictedPoint, ...]:
    """A prediction for every policy at every number of requests.

    Args:
        policies: by the arm's name.
    Raises:
        DataError: the cost table does not go so far, or there is nothing to predict from.
    """
    return tuple(
        PredictedPoint(
            concurrency=concurrency,
            arm=name,
            predicted=predict(
                recorded, policy, concurrency, times, rounds=settings.predicted_rounds, seed=settings.seed
            ),
        )
        for concurrency in settings.concurrency
        for name, policy in policies.items()
    )


# ---------------------------------------------------------------- after


class ComparedPoint(Model):
    """A prediction, and what happened. Prefills are no part of either."""

    concurrency: int
    arm: str
    predicted: Prediction
    tau: float  # measured, as are the following
    tokens_per_second: Measured
    latency_per_token_seconds: Measured
    tokens_per_second_error: float  # predicted / measured - 1
    latency_per_token_error: float


class AgainstBest(Model):
    """A policy against whichever of plain decoding and the fixed lengths is fastest at a load.

    The fastest is chosen on one half of the rounds, the ratio is of the other half: chosen and judged on the same
    rounds it would look faster than it is.
    """

    concurrency: int
    arm: str
    best: str
    ratio: Measured | None = None  # of tokens per second; None: too few rounds to judge on (`rounds.ENOUGH`)


class LoadReport(Model):
    """`studies/<build>/<study>/study.json` of a load study."""

    schema_: Literal["dspark/load-study/1"] = Field(default="dspark/load-study/1", alias="schema")
    study: Name
    build: Name
    target: Name
    gamma: int
    settings: LoadSettings
    dtype: DType
    threads: int
    loads: tuple[ThroughputReport, ...]  # one per number of requests, ascending
    against_best: tuple[AgainstBest, ...]
    gains: tuple[Gain, ...]  # the paper's forms, against `none` and `fixed(1)`
    compared: tuple[ComparedPoint, ...]
    median_tokens_per_second_error: float  # of the absolute errors, over all points
    median_latency_per_token_error: float
    absent: dict[str, str] = Field(default_factory=dict)


def load_report(
    study: str,
    predicted: PredictedLoad,
    comparisons: Sequence[Comparison],
    *,
    slas: Sequence[float] = (),
    absent: Mapping[str, str] | None = None,
) -> LoadReport:
    """Everything that is said of a load study.

    Args:
        comparisons: one per number of requests, ascending, of the arms that were predicted.
        slas: tokens per second of one user that somebody promised.
        absent: policies that were not measured, with reasons.
    Raises:
        DataError: nothing to time.
    """
    compared = tuple(_compared(point, comparisons) for point in predicted.points)
    curves = Curves(comparisons)
    names = [arm.name for arm in comparisons[0].arms]
    baselines = [name for name in BASELINES if name in names]
    return LoadReport(
        study=study,
        build=predicted.build,
        target=predicted.target,
        gamma=predicted.gamma,
        settings=predicted.settings,
        dtype=comparisons[0].dtype,
        threads=comparisons[0].threads,
        loads=tuple(comparison.report() for comparison in comparisons),
        against_best=tuple(one for comparison in comparisons for one in _against_best(comparison)),
        gains=tuple(
            gain
            for against in baselines
            for arm in names
            if arm not in (NONE, against)
            for gain in curves.gains(arm, against, slas)
        ),
        compared=compared,
        median_tokens_per_second_error=_median([one.tokens_per_second_error for one in compared]),
        median_latency_per_token_error=_median([one.latency_per_token_error for one in compared]),
        absent=dict(absent or {}),
    )


def _compared(point: PredictedPoint, comparisons: Sequence[Comparison]) -> ComparedPoint:
    comparison = next((one for one in comparisons if one.concurrency == point.concurrency), None)
    if comparison is None or point.arm not in comparison.rounds:
        raise DataError(f"{point.arm} at {point.concurrency} requests was predicted and not measured")
    rounds = comparison.rounds[point.arm]
    speed = over_prompts(rounds, lambda chosen: _after_prefill(rounds, chosen), comparison.seed)
    latency = over_prompts(rounds, lambda chosen: _latency(rounds, chosen), comparison.seed)
    emitted = sum(int(one.emitted.sum()) for each in rounds for one in each.requests)
    return ComparedPoint(
        concurrency=point.concurrency,
        arm=point.arm,
        predicted=point.predicted,
        tau=emitted / sum(each.cycles for each in rounds),
        tokens_per_second=speed,
        latency_per_token_seconds=latency,
        tokens_per_second_error=point.predicted.tokens_per_second / speed.value - 1,
        latency_per_token_error=point.predicted.latency_per_token_seconds / latency.value - 1,
    )


def _against_best(comparison: Comparison) -> list[AgainstBest]:
    choosing, _ = comparison.halves()
    fixed = [arm.name for arm in comparison.arms if arm.policy.name.startswith((NONE, "fixed"))]
    best = max(fixed, key=lambda name: comparison.ratio(name, choosing).value)
    return [
        AgainstBest(
            concurrency=comparison.concurrency,
            arm=arm.name,
            best=best,
            ratio=comparison.judged(arm.name, to=best),
        )
        for arm in comparison.arms
        if arm.name not in fixed
    ]


def _after_prefill(rounds: Sequence[Round], chosen: NDArray[np.intp]) -> float:
    """Tokens after the first ones, of all requests, over the time after the prefill."""
    tokens = sum(rounds[i].tokens - len(rounds[i].requests) for i in chosen)
    seconds = sum(rounds[i].seconds - rounds[i].requests[0].prefill_seconds for i in chosen)
    return float(tokens / seconds) if tokens else float("nan")


def _latency(rounds: Sequence[Round], chosen: NDArray[np.intp]) -> float:
    """Seconds of requests' cycles over the tokens that came with them."""
    requests = [one for i in chosen for one in rounds[i].requests]
    tokens = sum(int(one.emitted.sum()) for one in requests)
    return sum(float(one.cycle_seconds.sum()) for one in requests) / tokens if tokens else float("nan")


def _median(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors)))
