"""Ways of decoding that are compared in turn: what each did in every round, and what follows from it. No torch import.

Machines drift while they are measured, so arms run interleaved (A B C, C B A, ...) and ratios are taken within the
comparison. Intervals come from resampling groups of prompts, with all rounds of a group together; of few groups, rounds
are resampled instead, and intervals then tell nothing of how prompts differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dspark.config.models import DType
from dspark.decoding.policies import Policy
from dspark.errors import DataError, SettingsError
from dspark.evaluation.dispersion import FEWEST, critical, variance_of
from dspark.evaluation.results import ArmThroughput, CycleCost, LoadPoint, Percentiles, ThroughputReport
from dspark.io.progress import Progress
from dspark.measured import Measured, bootstrap

if TYPE_CHECKING:
    from dspark.decoding.drafting import Proposer

NONE = "none"
ENOUGH = 2 * FEWEST  # rounds from which on a choice between arms is judged
_GROUPS = 8  # of prompts; resampling fewer finds that all of them are the best one too often
_WARM_TOKENS = 8


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: in reports; `none` is plain decoding, which the others are compared with.
        proposer: what drafts in the reference engine; None for plain decoding, and where an engine drafts by itself.
        policy: how much is verified.
    """

    name: str
    proposer: Proposer | None
    policy: Policy


@dataclass(frozen=True)
class Request:
    """When the tokens of one request came.

    Attributes:
        token_ids: what it said.
        prefill_seconds: until its first token.
        cycle_seconds: of each cycle after that, [cycles].
        emitted: tokens that came with each cycle, [cycles].
    """

    token_ids: tuple[int, ...]
    prefill_seconds: float
    cycle_seconds: NDArray[np.float64]
    emitted: NDArray[np.int32]


@dataclass(frozen=True)
class Round:
    """What one arm did in one round.

    Attributes:
        group: which prompts.
        seconds: wall time of the whole round.
        requests: all that ran at the same time.
        cycles: of all requests together.
        verified: draft tokens that were verified in them.
        draft_seconds, verify_seconds: where the cycles' time went, summed over the cycles of all requests; None: the
            engine does not tell them apart.
    """

    group: int
    seconds: float
    requests: tuple[Request, ...]
    cycles: int
    verified: int
    draft_seconds: float | None
    verify_seconds: float | None

    @property
    def tokens(self) -> int:
        """Of all requests together, their first ones included."""
        return sum(len(one.token_ids) for one in self.requests)


Run = Callable[[Arm, int, int], Round]  # an arm, a group of prompts, and how many tokens to say


@dataclass(frozen=True)
class Comparison:
    """Interleaved rounds of some arms, as they were measured."""

    arms: tuple[Arm, ...]
    rounds: dict[str, list[Round]]  # by arm, in order
    temperature: float
    dtype: DType
    threads: int
    concurrency: int
    prompts: int
    max_new_tokens: int
    seed: int

    def report(self) -> ThroughputReport:
        """Everything, with intervals."""
        return ThroughputReport(
            temperature=self.temperature,
            dtype=self.dtype,
            threads=self.threads,
            rounds=len(self.rounds[NONE]),
            prompts=self.prompts,
            max_new_tokens=self.max_new_tokens,
            arms={arm.name: self._summary(arm) for arm in self.arms},
        )

    def only(self, names: Collection[str]) -> Comparison:
        """The same rounds of some of the arms."""
        return replace(
            self,
            arms=tuple(arm for arm in self.arms if arm.name in names),
            rounds={name: rounds for name, rounds in self.rounds.items() if name in names},
        )

    def ratio(self, arm: str, numbers: Sequence[int] | None = None, *, to: str = NONE) -> Measured:
        """Tokens per second of an arm against another one's, by default plain decoding's.

        Args:
            numbers: the rounds to take; None: all.
        """
        chosen = range(len(self.rounds[NONE])) if numbers is None else numbers
        mine, other = [self.rounds[arm][i] for i in chosen], [self.rounds[to][i] for i in chosen]
        return over_prompts(mine, lambda sample: _speed(mine, sample) / _speed(other, sample), self.seed)

    def halves(self) -> tuple[list[int], list[int]]:
        """The rounds that choose between arms, and as many that judge the choice.

        Each half has both orders of the arms equally often, and the groups of prompts as evenly as so many rounds can.
        Rounds behind the last four are in neither; fewer than four make no halves.
        """
        rounds = self.rounds[NONE]
        groups = len({each.group for each in rounds})
        # Pairs of rounds, one in each order, go to either half in turn. Where an even number of them is a pass over the
        # groups, the next pass begins with the other half: else a half would see the same groups in every pass.
        length = groups if groups % 2 == 0 else 2 * groups
        halves: tuple[list[int], list[int]] = ([], [])
        for number in range(len(rounds) // 4 * 4):
            halves[(number // length + number % length // 2) % 2].append(number)
        return halves

    def judged(self, arm: str, *, to: str = NONE) -> Measured | None:
        """`ratio` on the half that judges, with an interval that so few rounds allow.

        Percentiles of resampled units take their spread for known: of six normal ones the lower end lies above the
        truth in 6.7 of 100 cases. With Student's t and the same spread it does in 2.5.

        Returns:
            None: too few rounds for any interval (`ENOUGH`).
        """
        _, judge = self.halves()
        if len(judge) < FEWEST:
            return None
        found = self.ratio(arm, judge, to=to)
        reach = critical(0.05, found.n) * math.sqrt(variance_of(found))
        return found.model_copy(update={"ci95": (found.value - reach, found.value + reach)})

    def _summary(self, arm: Arm) -> ArmThroughput:
        rounds, plain = self.rounds[arm.name], self.rounds[NONE]
        pairs = [pair for a, b in zip(rounds, plain, strict=True) for pair in zip(a.requests, b.requests, strict=True)]
        compared = arm.name != NONE
        return ArmThroughput(
            load=_load(arm, rounds, self.concurrency, self.seed),
            cycle=_cycle(rounds, self.seed),
            against_none=self.ratio(arm.name) if compared else None,
            same_text=float(np.mean([a.token_ids == b.token_ids for a, b in pairs])) if compared else None,
        )


def run_in_turn(
    arms: Sequence[Arm],
    run: Run,
    *,
    prompts: int,
    concurrency: int,
    rounds: int,
    max_new_tokens: int,
    progress: Progress,
) -> dict[str, list[Round]]:
    """Run all arms once per round, forwards and backwards in turn; one warm-up of every arm is not counted.

    Args:
        run: decodes one group of `concurrency` prompts in one arm; rounds go through the groups in turn.
        prompts: how many there are.
        progress: advanced by one per arm and round; the caller starts the task.
    Returns:
        the rounds of each arm.
    Raises:
        SettingsError: no arm `none`, or two of one name.
        DataError: too few prompts.
    """
    names = [arm.name for arm in arms]
    if NONE not in names or len(set(names)) != len(names):
        raise SettingsError(f"throughput arms need different names and one named '{NONE}', they are {names}")
    if prompts < concurrency:
        raise DataError(f"{prompts} prompts are too few for {concurrency} concurrent requests")
    for arm in arms:
        run(arm, 0, min(_WARM_TOKENS, max_new_tokens))
    groups = prompts // concurrency
    done: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds):
        group = number % groups
        # Every pass turns the order around, so that no group is only ever asked in one of the two.
        for arm in arms if (number // groups + group) % 2 == 0 else reversed(arms):
            done[arm.name].append(run(arm, group, max_new_tokens))
            progress.advance()
    return done


def over_prompts(rounds: list[Round], statistic: Callable[[NDArray[np.intp]], float], seed: int) -> Measured:
    """A statistic of rounds with its interval over groups of prompts, or over rounds where these are fewer than eight.

    Args:
        statistic: of the rounds at the given places.
    Returns:
        n counts groups, or rounds; an interval over rounds is about these very prompts.
    Raises:
        DataError: it is undefined on all rounds.
    """
    groups = sorted({each.group for each in rounds})
    members = [np.flatnonzero([each.group == group for each in rounds]) for group in groups]
    if len(members) < _GROUPS:
        members = [np.array([index]) for index in range(len(rounds))]
    measured = bootstrap(
        len(members), lambda chosen: statistic(np.concatenate([members[i] for i in chosen])), seed=seed
    )
    if measured is None:
        raise DataError("every text ended with its first token: there was no cycle to time", "choose other prompts")
    return measured


def _speed(rounds: list[Round], chosen: NDArray[np.intp]) -> float:
    """Tokens per second of the chosen rounds together."""
    return float(sum(rounds[i].tokens for i in chosen) / sum(rounds[i].seconds for i in chosen))


def _load(arm: Arm, rounds: list[Round], concurrency: int, seed: int) -> LoadPoint:
    def per_user(chosen: NDArray[np.intp]) -> float:
        requests = [one for i in chosen for one in rounds[i].requests]
        seconds = sum(float(one.cycle_seconds.sum()) for one in requests)
        return sum(len(one.token_ids) - 1 for one in requests) / seconds if seconds else float("nan")

    requests = [one for each in rounds for one in each.requests]
    gaps = [np.repeat(one.cycle_seconds / one.emitted, one.emitted) for one in requests]
    return LoadPoint(
        concurrency=concurrency,
        arm=arm.name,
        policy=arm.policy.name,
        tokens_per_second=over_prompts(rounds, lambda chosen: _speed(rounds, chosen), seed),
        tokens_per_second_per_user=over_prompts(rounds, per_user, seed),
        verified_tokens_per_request=sum(each.verified for each in rounds) / sum(each.cycles for each in rounds),
        ttft_seconds=_percentiles(np.array([one.prefill_seconds for one in requests])),
        itl_seconds=_percentiles(np.concatenate(gaps)),
    )


def _cycle(rounds: list[Round], seed: int) -> CycleCost | None:
    if any(each.draft_seconds is None for each in rounds):
        return None

    def mean(field: str) -> Measured:
        def statistic(chosen: NDArray[np.intp]) -> float:
            cycles = sum(rounds[i].cycles for i in chosen)
            return float(sum(getattr(rounds[i], field) for i in chosen) / cycles) if cycles else float("nan")

        return over_prompts(rounds, statistic, seed)

    emitted = sum(int(one.emitted.sum()) for each in rounds for one in each.requests)
    tau = emitted / sum(each.cycles for each in rounds)
    draft, verify = mean("draft_seconds"), mean("verify_seconds")
    # From the clock around the whole call, so that what happens between cycles is in it.
    wall = sum(each.seconds - each.requests[0].prefill_seconds for each in rounds)
    users = sum(len(each.requests) for each in rounds) / len(rounds)
    return CycleCost(
        draft_seconds=draft,
        verify_seconds=verify,
        tau=tau,
        latency_per_token_predicted_seconds=(draft.value + verify.value) / tau,
        latency_per_token_measured_seconds=wall * users / emitted,
    )


def _percentiles(values: NDArray[np.float64]) -> Percentiles:
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return Percentiles(p50=float(p50), p95=float(p95), p99=float(p99))
