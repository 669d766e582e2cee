"""Tokens per second with drafts against plain decoding, in one process, in turn, on the same prompts.

Machines drift while they are measured, so arms run interleaved (A B C, C B A, ...) and ratios are taken within the
comparison; intervals come from resampling prompts, with all rounds of a prompt together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.config.models import DType
from dspark.decoding.drafting import Proposer
from dspark.decoding.loop import decode
from dspark.decoding.policies import Policy
from dspark.decoding.records import Decoded
from dspark.errors import DataError, SettingsError
from dspark.evaluation.results import (
    ArmThroughput,
    CycleCost,
    LoadPoint,
    Pareto,
    ParetoPoint,
    Percentiles,
    ThroughputReport,
)
from dspark.io.progress import Progress
from dspark.measured import Measured, bootstrap
from dspark.targets.loading import Target

NONE = "none"
_WARM_TOKENS = 8


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: in reports; `none` is plain decoding, which the others are compared with.
        proposer: what drafts; None for plain decoding.
        policy: how much is verified.
    """

    name: str
    proposer: Proposer | None
    policy: Policy


@dataclass(frozen=True)
class _Round:
    """What one arm did in one round."""

    group: int  # which prompts
    seconds: float
    decoded: list[Decoded]

    @property
    def tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.decoded)


@dataclass(frozen=True)
class Comparison:
    """Interleaved rounds of some arms, as they were measured."""

    arms: tuple[Arm, ...]
    rounds: dict[str, list[_Round]]  # by arm, in order
    temperature: float
    dtype: DType
    threads: int
    concurrency: int
    prompts: int
    max_new_tokens: int
    seed: int

    def report(self) -> ThroughputReport:
        """Everything, with intervals over prompts."""
        return ThroughputReport(
            temperature=self.temperature,
            dtype=self.dtype,
            threads=self.threads,
            rounds=len(self.rounds[NONE]),
            prompts=self.prompts,
            max_new_tokens=self.max_new_tokens,
            arms={arm.name: self._summary(arm) for arm in self.arms},
        )

    def ratio(self, arm: str, numbers: Sequence[int] | None = None) -> Measured:
        """Tokens per second of an arm against plain decoding.

        Args:
            numbers: the rounds to take; None: all.
        """
        chosen = range(len(self.rounds[NONE])) if numbers is None else numbers
        mine, plain = [self.rounds[arm][i] for i in chosen], [self.rounds[NONE][i] for i in chosen]
        return _over_prompts(mine, lambda sample: _speed(mine, sample) / _speed(plain, sample), self.seed)

    def _summary(self, arm: Arm) -> ArmThroughput:
        rounds, plain = self.rounds[arm.name], self.rounds[NONE]
        pairs = [pair for a, b in zip(rounds, plain, strict=True) for pair in zip(a.decoded, b.decoded, strict=True)]
        compared = arm.name != NONE
        return ArmThroughput(
            load=_load(arm, rounds, self.concurrency, self.seed),
            cycle=_cycle(rounds, self.seed),
            against_none=self.ratio(arm.name) if compared else None,
            same_text=float(np.mean([a.token_ids == b.token_ids for a, b in pairs])) if compared else None,
        )


def compare(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    *,
    rounds: int,
    max_new_tokens: int,
    concurrency: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Measure arms in turn.

    Every round decodes `concurrency` prompts once in every arm; rounds go through the prompts in turn. One warm-up of
    every arm is not counted.

    Args:
        target: in the dtype to measure, on the threads to measure.
        arms: `none` among them.
        prompts: token ids; at least `concurrency`.
        rounds: at least two; ten or more for a figure that is quoted (package.md).
        progress: advanced by one per arm and round; the caller starts the task.
    Raises:
        SettingsError: no arm `none`, or two of one name.
        DataError: too few prompts.
    """
    names = [arm.name for arm in arms]
    if NONE not in names or len(set(names)) != len(names):
        raise SettingsError(f"throughput arms need different names and one named '{NONE}', they are {names}")
    if len(prompts) < concurrency:
        raise DataError(f"{len(prompts)} prompts are too few for {concurrency} concurrent requests")
    progress = progress or Progress()
    groups = len(prompts) // concurrency

    def run(arm: Arm, group: int, tokens: int) -> _Round:
        chosen = range(group * concurrency, (group + 1) * concurrency)
        started = perf_counter()
        decoded = decode(
            target,
            arm.proposer,
            [prompts[index] for index in chosen],
            max_new_tokens=tokens,
            policy=arm.policy,
            temperature=temperature,
            seeds=[seed + index for index in chosen],
            batch_size=concurrency,
        )
        return _Round(group, perf_counter() - started, decoded)

    for arm in arms:
        run(arm, 0, min(_WARM_TOKENS, max_new_tokens))
    done: dict[str, list[_Round]] = {name: [] for name in names}
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            done[arm.name].append(run(arm, number % groups, max_new_tokens))
            progress.advance()
    return Comparison(
        arms=tuple(arms),
        rounds=done,
        temperature=temperature,
        dtype=dtype_name(target),
        threads=torch.get_num_threads(),
        concurrency=concurrency,
        prompts=min(rounds, groups) * concurrency,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )


def pareto(report: Sequence[ThroughputReport]) -> Pareto:
    """All load points of some reports of one dtype and thread count, with the frontier marked."""
    points = [arm.load for part in report for arm in part.arms.values()]

    def beaten(point: LoadPoint) -> bool:
        total, user = point.tokens_per_second.value, point.tokens_per_second_per_user.value
        return any(
            other.tokens_per_second.value >= total
            and other.tokens_per_second_per_user.value >= user
            and (other.tokens_per_second.value, other.tokens_per_second_per_user.value) != (total, user)
            for other in points
        )

    return Pareto(
        dtype=report[0].dtype,
        threads=report[0].threads,
        points=tuple(ParetoPoint(**vars(point), on_frontier=not beaten(point)) for point in points),
    )


def dtype_name(target: Target) -> DType:
    """The target's dtype as settings spell it."""
    names: dict[torch.dtype, DType] = {
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
    }
    return names[target.dtype]


def _speed(rounds: list[_Round], chosen: NDArray[np.intp]) -> float:
    """Tokens per second of the chosen rounds together."""
    return float(sum(rounds[i].tokens for i in chosen) / sum(rounds[i].seconds for i in chosen))


def _load(arm: Arm, rounds: list[_Round], concurrency: int, seed: int) -> LoadPoint:
    def per_user(chosen: NDArray[np.intp]) -> float:
        decoded = [one for i in chosen for one in rounds[i].decoded]
        seconds = sum(float(one.cycle_seconds.sum()) for one in decoded)
        return sum(len(one.token_ids) - 1 for one in decoded) / seconds if seconds else float("nan")

    decoded = [one for each in rounds for one in each.decoded]
    cycles = sum(len(one.cycles) for one in decoded)
    gaps = [np.repeat(one.cycle_seconds / one.emitted, one.emitted) for one in decoded]
    return LoadPoint(
        concurrency=concurrency,
        arm=arm.name,
        policy=arm.policy.name,
        tokens_per_second=_over_prompts(rounds, lambda chosen: _speed(rounds, chosen), seed),
        tokens_per_second_per_user=_over_prompts(rounds, per_user, seed),
        verified_tokens_per_request=sum(int(one.cycles.verified.sum()) for one in decoded) / cycles,
        ttft_seconds=_percentiles(np.array([one.prefill_seconds for one in decoded])),
        itl_seconds=_percentiles(np.concatenate(gaps)),
    )


def _cycle(rounds: list[_Round], seed: int) -> CycleCost:
    cycles = [[one.cycles for one in each.decoded] for each in rounds]

    def mean(field: str) -> Measured:
        def statistic(chosen: NDArray[np.intp]) -> float:
            return float(np.concatenate([getattr(part, field) for i in chosen for part in cycles[i]]).mean())

        return _over_prompts(rounds, statistic, seed)

    decoded = [one for each in rounds for one in each.decoded]
    emitted = sum(int(one.emitted.sum()) for one in decoded)
    tau = emitted / sum(len(one.cycles) for one in decoded)
    draft, verify = mean("draft_seconds"), mean("verify_seconds")
    # From the clock around the whole call, so that what happens between cycles is in it.
    wall = sum(each.seconds - each.decoded[0].prefill_seconds for each in rounds)
    users = sum(len(each.decoded) for each in rounds) / len(rounds)
    return CycleCost(
        draft_seconds=draft,
        verify_seconds=verify,
        tau=tau,
        latency_per_token_predicted_seconds=(draft.value + verify.value) / tau,
        latency_per_token_measured_seconds=wall * users / emitted,
    )


def _over_prompts(rounds: list[_Round], statistic: Callable[[NDArray[np.intp]], float], seed: int) -> Measured:
    """A statistic of rounds with its interval over prompts, or over rounds where there is one group of prompts."""
    groups = sorted({each.group for each in rounds})
    members = [np.flatnonzero([each.group == group for each in rounds]) for group in groups]
    if len(members) == 1:
        members = [np.array([index]) for index in range(len(rounds))]
    measured = bootstrap(
        len(members), lambda chosen: statistic(np.concatenate([members[i] for i in chosen])), seed=seed
    )
    if measured is None:
        raise DataError("every text ended with its first token: there was no cycle to time", "choose other prompts")
    return measured


def _percentiles(values: NDArray[np.float64]) -> Percentiles:
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return Percentiles(p50=float(p50), p95=float(p95), p99=float(p99))
