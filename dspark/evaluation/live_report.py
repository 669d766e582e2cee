"""What a live load came to: rounds as they were measured, and the report that is made of them. No torch import.

Every round is a trace of its own that all arms are asked in turn, so rounds are what intervals are taken over and
ratios are paired within them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dspark.config.models import DType, LiveLoadSettings
from dspark.errors import DataError
from dspark.evaluation.results import Model
from dspark.evaluation.rounds import NONE
from dspark.io.csvfile import write_csv
from dspark.io.jsonfile import write_model
from dspark.measured import Measured, bootstrap, bootstrap_sums

Floats = NDArray[np.float64]
Chosen = NDArray[np.intp]

REPORT, TIMELINE, SUMMARY = "live.json", "timeline.csv", "summary.csv"

# ---------------------------------------------------------------- as measured; seconds since the trace began


@dataclass(frozen=True)
class Step:
    """One prefill or one cycle of the engine.

    Attributes:
        begins, ends: when.
        rows: requests that were in it.
        verified: draft tokens that the target looked at, of all of them.
        tokens: that came at its end.
        cycle: False for a prefill.
    """

    begins: float
    ends: float
    rows: int
    verified: int
    tokens: int
    cycle: bool


@dataclass(frozen=True)
class Served:
    """One request.

    Attributes:
        arrives: when it came.
        joins: when its prefill began.
        first: when its first token was there.
        gaps: seconds between its tokens, [tokens - 1]; those of one cycle come together and share its time evenly.
        token_ids: what it said.
    """

    arrives: float
    joins: float
    first: float
    gaps: Floats
    token_ids: tuple[int, ...]

    @property
    def ends(self) -> float:
        """When its last token was there."""
        return self.first + float(self.gaps.sum())


@dataclass(frozen=True)
class LiveRound:
    """What one arm did with one trace.

    Attributes:
        seconds: until the last request was done.
        steps: in order.
        served: in the order in which they came.
    """

    seconds: float
    steps: tuple[Step, ...]
    served: tuple[Served, ...]

    @property
    def tokens(self) -> int:
        """Of all requests."""
        return sum(len(one.token_ids) for one in self.served)


def seconds_per_token(rounds: Sequence[LiveRound]) -> float:
    """From a request's arrival to its last token, over its tokens; the mean over all requests: waiting counts."""
    return float(np.mean([(one.ends - one.arrives) / len(one.token_ids) for each in rounds for one in each.served]))


# ---------------------------------------------------------------- as reported


class MeasuredPercentiles(Model):
    """Of a latency over all requests or tokens, with intervals over rounds."""

    p50: Measured
    p95: Measured
    p99: Measured


class LiveInterval(Model):
    """A stretch of the trace, on average over the rounds."""

    seconds: float  # when it begins
    arrivals_per_second: float
    concurrency: Measured  # requests in the engine, over the time
    waiting: float  # requests that came and found no slot, over the time
    tokens_per_second: Measured
    verified_tokens_per_second: Measured  # draft tokens that the target looked at
    verified_tokens_per_request: float | None = None  # and cycle; None: there was no cycle


class LiveRatios(Model):
    """Against another arm on the same traces: above 1 is more."""

    tokens_per_second: Measured
    ttft_p95: Measured
    itl_p95: Measured
    seconds_per_token: Measured


class LiveArm(Model):
    """One policy under the load."""

    policy: str
    tokens_per_second: Measured  # of all requests, over the time until the last one is done
    verified_tokens_per_second: Measured  # over the same time
    busy: float  # share of that time in which there was something to do
    ttft_seconds: MeasuredPercentiles  # from arrival to first token
    itl_seconds: MeasuredPercentiles
    seconds_per_token: Measured  # see `seconds_per_token`
    against: dict[str, LiveRatios]  # none, the best fixed length, and other drafters
    same_text: float | None = None  # share of requests with exactly the text of plain decoding; at temperature 0
    timeline: tuple[LiveInterval, ...]


class LiveReport(Model):
    """`live.json`."""

    schema_: Literal["dspark/live-load/1"] = Field(default="dspark/live-load/1", alias="schema")
    settings: LiveLoadSettings
    seconds: float  # for which requests came, in every round
    requests_per_second: tuple[float, float]  # lowest and highest
    requests: int  # of all rounds together
    slots: int
    gamma: int
    dtype: DType
    threads: int
    best_fixed: str  # the fixed length that served a trace of its own best
    selection_seconds_per_token: dict[str, float]  # of every fixed length on that trace
    arms: dict[str, LiveArm]


@dataclass(frozen=True)
class Compared:
    """An arm's rounds.

    Attributes:
        policy: its name in reports.
        baseline: whether the others are held against it.
    """

    policy: str
    baseline: bool
    rounds: Sequence[LiveRound]


def summarise(compared: Mapping[str, Compared], settings: LiveLoadSettings, seconds: float) -> dict[str, LiveArm]:
    """Everything that is reported of each arm.

    Args:
        compared: arms, `none` among them, with equally many rounds on the same traces.
        seconds: for which requests came.
    Raises:
        DataError: nothing was said, or no second token.
    """
    width = seconds / settings.intervals
    last = max(each.seconds for arm in compared.values() for each in arm.rounds)
    # What is still done when no more requests come belongs to the picture.
    edges = np.arange(max(settings.intervals, int(np.ceil(last / width))) + 1, dtype=np.float64) * width
    figures = {name: _Figures(arm.rounds, settings.seed) for name, arm in compared.items()}
    greedy = settings.sampling.temperature == 0
    return {
        name: LiveArm(
            policy=arm.policy,
            **figures[name].totals(),
            against={
                other: figures[name].ratios(figures[other])
                for other, base in compared.items()
                if base.baseline and other != name
            },
            same_text=_same_text(arm, compared[NONE]) if greedy and name != NONE else None,
            timeline=_timeline(arm.rounds, edges, settings.seed),
        )
        for name, arm in compared.items()
    }


class _Figures:
    """An arm's rounds as arrays, for statistics of resampled rounds."""

    def __init__(self, rounds: Sequence[LiveRound], seed: int) -> None:
        self._rounds, self._seed = rounds, seed
        self._sums = np.array(
            [
                [
                    each.seconds,
                    each.tokens,
                    sum(step.verified for step in each.steps),
                    sum(step.ends - step.begins for step in each.steps),
                    sum((one.ends - one.arrives) / len(one.token_ids) for one in each.served),
                    len(each.served),
                ]
                for each in rounds
            ],
            float,
        )
        self._ttft = _Pooled([np.array([one.first - one.arrives for one in each.served]) for each in rounds])
        self._itl = _Pooled([np.concatenate([np.zeros(0), *(one.gaps for one in each.served)]) for each in rounds])
        if not self._ttft.count or not self._itl.count:
            raise DataError(
                "no request said a second token: there is nothing to time",
                "let more requests come (seconds, requests_per_second), or choose other prompts",
            )

    def totals(self) -> dict[str, Any]:
        """The fields of `LiveArm` that are about this arm alone."""
        seconds, *_, busy, _, _ = self._sums.sum(axis=0)
        return {
            "tokens_per_second": self._measured(lambda chosen: self._quotient(1, 0, chosen)),
            "verified_tokens_per_second": self._measured(lambda chosen: self._quotient(2, 0, chosen)),
            "busy": float(busy / seconds),
            "ttft_seconds": self._percentiles(self._ttft),
            "itl_seconds": self._percentiles(self._itl),
            "seconds_per_token": self._measured(lambda chosen: self._quotient(4, 5, chosen)),
        }

    def ratios(self, other: _Figures) -> LiveRatios:
        """These rounds against the other arm's on the same traces."""

        def ratio(statistic: Callable[[_Figures, Chosen], float]) -> Measured:
            return self._measured(lambda chosen: statistic(self, chosen) / statistic(other, chosen))

        return LiveRatios(
            tokens_per_second=ratio(lambda one, chosen: one._quotient(1, 0, chosen)),
            ttft_p95=ratio(lambda one, chosen: one._ttft.at(0.95, chosen)),
            itl_p95=ratio(lambda one, chosen: one._itl.at(0.95, chosen)),
            seconds_per_token=ratio(lambda one, chosen: one._quotient(4, 5, chosen)),
        )

    def _quotient(self, above: int, below: int, chosen: Chosen) -> float:
        sums = self._sums[chosen].sum(axis=0)
        return float(sums[above] / sums[below])

    def _percentiles(self, pooled: _Pooled) -> MeasuredPercentiles:
        def at(share: float) -> Measured:
            return self._measured(lambda chosen: pooled.at(share, chosen))

        return MeasuredPercentiles(p50=at(0.5), p95=at(0.95), p99=at(0.99))

    def _measured(self, statistic: Callable[[Chosen], float]) -> Measured:
        found = bootstrap(len(self._rounds), statistic, seed=self._seed)
        if found is None:
            raise DataError("no round was measured")
        return found


class _Pooled:
    """Values of all rounds, sorted once, for percentiles of resampled rounds."""

    def __init__(self, rounds: Sequence[Floats]) -> None:
        values = np.concatenate(rounds)
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._owners = np.repeat(np.arange(len(rounds)), [len(one) for one in rounds])[order]
        self._rounds = len(rounds)

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self._values)

    def at(self, share: float, chosen: Chosen) -> float:
        """The smallest value that at least this share of the chosen rounds' values does not exceed."""
        below = np.bincount(chosen, minlength=self._rounds)[self._owners].cumsum()
        place = np.searchsorted(below, share * below[-1])
        return float(self._values[min(int(place), self.count - 1)])


def _timeline(rounds: Sequence[LiveRound], edges: Floats, seed: int) -> tuple[LiveInterval, ...]:
    width = edges[1] - edges[0]
    parts = []  # per round: arrivals, concurrency, waiting, tokens, verified, requests in cycles; all per second
    for each in rounds:
        begins, ends = (np.array([getattr(step, side) for step in each.steps], float) for side in ("begins", "ends"))
        shares = _overlaps(begins, ends, edges) / np.maximum(ends - begins, 1e-12)[:, None]
        counts = np.array([[step.tokens, step.verified, step.rows * step.cycle] for step in each.steps], float)
        moments = np.array([[one.arrives, one.joins, one.ends] for one in each.served], float).T
        parts.append(
            np.stack(
                [
                    np.histogram(moments[0], edges)[0] / width,
                    _overlaps(moments[1], moments[2], edges).sum(0) / width,
                    _overlaps(moments[0], moments[1], edges).sum(0) / width,
                    *(shares.T @ counts / width).T,
                ]
            )
        )
    values = np.stack(parts)  # [rounds, 6, intervals]

    def measured(kind: int, place: int) -> Measured:
        column = np.stack([values[:, kind, place], np.ones(len(rounds))], 1)
        found = bootstrap_sums(column, lambda sums: sums[..., 0] / sums[..., 1], seed=seed)
        if found is None:
            raise DataError("no round was measured")
        return found

    means = values.mean(0)
    return tuple(
        LiveInterval(
            seconds=float(edges[place]),
            arrivals_per_second=float(means[0, place]),
            concurrency=measured(1, place),
            waiting=float(means[2, place]),
            tokens_per_second=measured(3, place),
            verified_tokens_per_second=measured(4, place),
            verified_tokens_per_request=float(means[4, place] / means[5, place]) if means[5, place] else None,
        )
        for place in range(len(edges) - 1)
    )


def _overlaps(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    """Seconds of each stretch in each interval, [stretches, intervals]."""
    overlaps: Floats = np.minimum(ends[:, None], edges[1:]) - np.maximum(begins[:, None], edges[:-1])
    return overlaps.clip(min=0)


def _same_text(arm: Compared, plain: Compared) -> float:
    pairs = [
        mine.token_ids == theirs.token_ids
        for a, b in zip(arm.rounds, plain.rounds, strict=True)
        for mine, theirs in zip(a.served, b.served, strict=True)
    ]
    return float(np.mean(pairs))


# ---------------------------------------------------------------- files


def write_report(folder: Path, report: LiveReport) -> None:
    """Write `live.json`, and its timelines and totals as CSV beside it."""
    write_model(folder / REPORT, report)
    columns = ["arm", "seconds", "arrivals_per_second", *_columns("concurrency"), "waiting"]
    columns += [*_columns("tokens_per_second"), *_columns("verified_tokens_per_second"), "verified_tokens_per_request"]
    write_csv(
        folder / TIMELINE,
        columns,
        [
            [
                name,
                one.seconds,
                one.arrivals_per_second,
                *_cells(one.concurrency),
                one.waiting,
                *_cells(one.tokens_per_second),
                *_cells(one.verified_tokens_per_second),
                one.verified_tokens_per_request,
            ]
            for name, arm in report.arms.items()
            for one in arm.timeline
        ],
    )
    figures = ["tokens_per_second", "verified_tokens_per_second", "seconds_per_token"]
    latencies = [f"{kind}_{part}_seconds" for kind in ("ttft", "itl") for part in ("p50", "p95", "p99")]
    write_csv(
        folder / SUMMARY,
        ["arm", *(column for name in (*figures, *latencies) for column in _columns(name)), "busy"],
        [
            [
                name,
                *(cell for figure in figures for cell in _cells(getattr(arm, figure))),
                *(
                    cell
                    for percentiles in (arm.ttft_seconds, arm.itl_seconds)
                    for one in (percentiles.p50, percentiles.p95, percentiles.p99)
                    for cell in _cells(one)
                ),
                arm.busy,
            ]
            for name, arm in report.arms.items()
        ],
    )


def _columns(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def _cells(measured: Measured) -> list[float]:
    return [measured.value, *measured.ci95]
