"""A live load in the reference engine: requests come whether or not others are done, under one policy after the other.

Closed-loop rounds (`throughput`) keep the number of requests as it is; here it follows from how fast a policy is, as it
does where users come and go. Time enters through a clock, so that tests need not take any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark.config.models import LiveLoadSettings
from dspark.decoding.clock import Clock, WallClock
from dspark.decoding.drafting import Proposer
from dspark.decoding.draws import CounterDraws
from dspark.decoding.loop import ContinuousBatch
from dspark.decoding.policies import Fixed, NoDrafts, parse_policy
from dspark.decoding.records import Decoded
from dspark.decoding.room import drafting, positions_for
from dspark.decoding.truncation import Truncation
from dspark.errors import DataError, SettingsError
from dspark.evaluation.live_report import (
    Compared,
    LiveReport,
    LiveRound,
    Served,
    Step,
    seconds_per_token,
    summarise,
)
from dspark.evaluation.rounds import NONE, Arm
from dspark.evaluation.trace import Arrival, Rates, Trace, make_trace
from dspark.io.progress import Progress
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

_PATIENCE = 0.5  # seconds until a requested stop is obeyed where nobody comes
_TICK = 1e-6  # seconds waited at least: a shorter time may not move a clock at all, and an arrival would never be due
_ALONE = 3  # requests whose mean time, one after the other, is that of one at a time


@dataclass(frozen=True)
class Prompts:
    """What may be asked.

    Attributes:
        token_ids: of each prompt.
        domains: of each prompt.
    """

    token_ids: Sequence[Sequence[int]]
    domains: Sequence[str]


@dataclass(frozen=True)
class LiveArms:
    """What takes turns under the load.

    Attributes:
        lengths: one arm for every fixed length; the best of them on a trace of its own is compared with the others.
        baselines: other drafters, which the policies are held against too.
        policies: that choose lengths by confidence.
    """

    lengths: Sequence[Arm]
    baselines: Sequence[Arm]
    policies: Sequence[Arm]

    @classmethod
    def of(
        cls,
        proposer: Proposer,
        settings: LiveLoadSettings,
        *,
        scheduler: PrefixScheduler | None = None,
        temperatures: Sequence[float] | None = None,
        rivals: Mapping[str, Proposer] | None = None,
    ) -> LiveArms:
        """The arms of one drafter.

        Args:
            scheduler: for the policies that are scheduled.
            temperatures: for policies with a threshold, [gamma].
            rivals: other drafters, such as mtp1, by their names in reports; they verify whole blocks.
        Raises:
            SettingsError: a policy that does not exist, or is scheduled without a scheduler.
        """
        chosen = [parse_policy(name, scheduler=scheduler, temperatures=temperatures) for name in settings.policies]
        return cls(
            lengths=[Arm(f"fixed({k})", proposer, Fixed(k)) for k in range(1, proposer.gamma + 1)],
            baselines=[Arm(name, rival, Fixed()) for name, rival in (rivals or {}).items()],
            policies=[Arm(policy.name, proposer, policy) for policy in chosen],
        )


def live_load(
    target: Target,
    arms: LiveArms,
    prompts: Prompts,
    settings: LiveLoadSettings,
    *,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> LiveReport:
    """Replay one trace per round under every arm, forwards and backwards in turn.

    Args:
        target: in the dtype to measure, on the threads to measure.
        clock: None: real time.
        progress: advanced by one per finished request.
    Raises:
        SettingsError: two arms of one name.
        DataError: no prompt of a domain, a prompt that does not fit, a load in which nobody came, or nothing to time.
    """
    progress = progress or Progress()
    engine = LiveEngine(target, prompts, settings, clock or WallClock(target.device))
    plain = Arm(NONE, None, NoDrafts())
    everyone = [plain, *arms.lengths, *arms.baselines, *arms.policies]
    names = [arm.name for arm in everyone]
    if len(set(names)) != len(names):
        raise SettingsError(
            f"arms of a live load need different names, they are {names}",
            "none and the fixed lengths are there already: leave them out of `policies`",
        )
    if not prompts.token_ids:
        raise DataError("there is no prompt to ask", "dspark run makes them: stage prompts")
    progress.start("warm up", len(everyone), unit="requests")
    for arm in everyone:
        engine.replay(arm, Trace(0.0, (Arrival(0.0, 0),)), progress)
    rates = engine.rates(plain, progress)
    seeds = range(settings.seed, settings.seed + settings.rounds + 1)
    traces = [make_trace(settings, rates, prompts.domains, seed) for seed in seeds]
    if not all(one.arrivals for one in traces):
        raise DataError(
            f"in {traces[0].seconds:.3g} s at {rates.lowest:.3g} to {rates.highest:.3g} requests a second nobody came",
            "let it last longer (seconds), or say how many shall come (requests)",
        )
    first, *others = traces
    progress.start("choose a fixed length", len(arms.lengths) * len(first.arrivals), unit="requests")
    chosen_by = {arm.name: seconds_per_token([engine.replay(arm, first, progress)]) for arm in arms.lengths}
    best = min(arms.lengths, key=lambda arm: chosen_by[arm.name])
    running = [plain, best, *arms.baselines, *arms.policies]
    rounds: dict[str, list[LiveRound]] = {arm.name: [] for arm in running}
    progress.start("replay", len(running) * sum(len(one.arrivals) for one in others), unit="requests")
    for number, each in enumerate(others):
        for arm in running if number % 2 == 0 else reversed(running):
            rounds[arm.name].append(engine.replay(arm, each, progress))
    baselines = {NONE, best.name, *(arm.name for arm in arms.baselines)}
    compared = {arm.name: Compared(arm.policy.name, arm.name in baselines, rounds[arm.name]) for arm in running}
    return LiveReport(
        settings=settings,
        seconds=first.seconds,
        requests_per_second=(rates.lowest, rates.highest),
        requests=sum(len(one.arrivals) for one in others),
        slots=engine.slots,
        gamma=len(arms.lengths),
        dtype=target.dtype_name,
        threads=torch.get_num_threads(),
        best_fixed=best.name,
        selection_seconds_per_token=chosen_by,
        arms=summarise(compared, settings, first.seconds),
    )


class LiveEngine:
    """The reference engine, as it serves one arm after the other."""

    def __init__(self, target: Target, prompts: Prompts, settings: LiveLoadSettings, clock: Clock) -> None:
        self._target, self._prompts, self._settings, self._clock = target, prompts, settings, clock
        self.slots = settings.slots or settings.peak

    def rates(self, plain: Arm, progress: Progress) -> Rates:
        """At which plain decoding has one request, and `peak` of them, at a time: as many over the time of each."""
        if self._settings.requests_per_second is not None:
            return Rates(*self._settings.requests_per_second)
        peak, found = self._settings.peak, []
        progress.start("measure plain decoding", _ALONE + 2 * peak, unit="requests")
        for together, requests in ((1, _ALONE), (peak, 2 * peak)):
            asked = make_trace(
                self._settings.model_copy(update={"requests": requests, "seconds": None}),
                Rates(1.0, 1.0),
                self._prompts.domains,
                self._settings.seed,
            )
            at_once = tuple(Arrival(0.0, one.prompt) for one in asked.arrivals)
            done = self.replay(plain, Trace(0.0, at_once), progress, slots=together)
            found.append(requests / done.seconds)
        return Rates(min(found), max(found))

    def replay(self, arm: Arm, asked: Trace, progress: Progress, *, slots: int | None = None) -> LiveRound:
        """Serve a trace: who comes waits for a slot, and joins between two cycles.

        Args:
            slots: requests at a time; None: the settings'.
        """
        settings, clock = self._settings, self._clock
        prompts = [self._prompts.token_ids[one.prompt] for one in asked.arrivals]
        batch = ContinuousBatch(
            self._target,
            arm.proposer,
            slots=min(slots or self.slots, len(prompts)),
            positions=positions_for(self._target, drafting(arm.proposer, arm.policy), prompts, settings.new_tokens),
            policy=arm.policy,
            temperature=settings.sampling.temperature,
            truncation=Truncation(settings.sampling.top_k, settings.sampling.top_p),
            draws=CounterDraws([settings.seed + number for number in range(len(prompts))]),
        )
        diary = _Diary(asked)
        coming, waiting = deque(enumerate(asked.arrivals)), deque[int]()
        started = clock.now()
        while coming or waiting or batch.active:
            begins = clock.now() - started
            while coming and coming[0][1].seconds <= begins:
                waiting.append(coming.popleft()[0])
            before = batch.active
            if waiting and batch.free:
                joining = [waiting.popleft() for _ in range(min(batch.free, len(waiting)))]
                batch.join([prompts[number] for number in joining], joining, settings.new_tokens)
                diary.joined(joining, begins, clock.now() - started)
            elif before:
                batch.cycle()
                diary.cycled(begins, clock.now() - started, before)
            else:
                clock.wait(min(max(coming[0][1].seconds - begins, _TICK), _PATIENCE))
            done = batch.finished()
            diary.finished(done)
            progress.advance(len(done))
        return diary.round()


class _Diary:
    """Writes down when what happened in a replay."""

    def __init__(self, asked: Trace) -> None:
        self._asked = asked
        self._steps: list[tuple[float, float, int]] = []  # when it began and ended, requests in it
        self._cycles: list[int] = []  # which steps are cycles
        self._joined: dict[int, tuple[float, float, int, int]] = {}  # prefill's begin, end, step; cycles before it
        self._done: dict[int, Decoded] = {}

    def joined(self, requests: Sequence[int], begins: float, ends: float) -> None:
        """A prefill."""
        self._joined.update(dict.fromkeys(requests, (begins, ends, len(self._steps), len(self._cycles))))
        self._steps.append((begins, ends, len(requests)))

    def cycled(self, begins: float, ends: float, rows: int) -> None:
        """A cycle."""
        self._cycles.append(len(self._steps))
        self._steps.append((begins, ends, rows))

    def finished(self, done: Mapping[int, Decoded]) -> None:
        """Requests that have their last token."""
        self._done.update(done)

    def round(self) -> LiveRound:
        """Everything."""
        verified, tokens = (np.zeros(len(self._steps), np.int64) for _ in range(2))
        served = []
        for number, arrival in enumerate(self._asked.arrivals):
            decoded = self._done[number]
            joins, first, prefill, cycles = self._joined[number]
            own = self._cycles[cycles : cycles + len(decoded.cycles)]  # a request is in every cycle until it ends
            tokens[prefill] += 1
            tokens[own] += decoded.emitted
            verified[own] += decoded.cycles.verified
            ends = np.array([first, *(self._steps[step][1] for step in own)])
            gaps = np.repeat(np.diff(ends) / decoded.emitted, decoded.emitted)
            served.append(Served(arrival.seconds, joins, first, gaps, tuple(decoded.token_ids)))
        cycle = set(self._cycles)
        return LiveRound(
            seconds=max(ends for _, ends, _ in self._steps),
            steps=tuple(
                Step(begins, ends, rows, int(verified[place]), int(tokens[place]), place in cycle)
                for place, (begins, ends, rows) in enumerate(self._steps)
            ),
            served=tuple(served),
        )
