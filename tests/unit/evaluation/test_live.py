"""A live load on a clock that the test turns: the real engine runs, and its passes take what the test says."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.config.models import LiveLoadSettings, Sampling
from dspark.decoding.drafting import TorchProposer
from dspark.decoding.loop import ContinuousBatch, decode
from dspark.decoding.policies import Fixed, NoDrafts
from dspark.errors import DataError, Interrupted, SettingsError
from dspark.evaluation.live import LiveArms, LiveEngine, Prompts, live_load
from dspark.evaluation.live_report import LiveReport, _Pooled, write_report
from dspark.evaluation.rounds import NONE, Arm
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.evaluation.trace import Arrival, Trace
from dspark.io.jsonfile import read_model
from dspark.io.progress import Progress
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target

PROMPTS = Prompts([[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5], [11, 12, 13, 14, 15, 16]], ["code", "chat", "code", "chat"])
PLAIN = Arm(NONE, None, NoDrafts())


class Clock:
    """Turned by the passes of the engine, and by who waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cycle: Callable[[str, int], float], prefill: float) -> None:
        self.seconds, self.ran = 0.0, []
        real = {name: getattr(ContinuousBatch, name) for name in ("cycle", "join")}

        def cycled(batch: ContinuousBatch) -> Any:
            self.seconds += cycle(batch.policy.name, batch.active)
            return real["cycle"](batch)

        def joined(batch: ContinuousBatch, *arguments: Any) -> float:
            if not self.ran or self.ran[-1] != batch.policy.name:
                self.ran.append(batch.policy.name)
            self.seconds += prefill
            return real["join"](batch, *arguments)

        monkeypatch.setattr(ContinuousBatch, "cycle", cycled)
        monkeypatch.setattr(ContinuousBatch, "join", joined)

    def now(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.seconds += seconds


@pytest.fixture(scope="module")
def target() -> Target:
    made = tiny_target(40, spread=0.3)
    made.eos_token_ids = frozenset()  # every text is as long as it may be
    return made


@pytest.fixture(scope="module")
def arms(target: Target) -> Callable[[LiveLoadSettings], LiveArms]:
    curve = CostCurve(sample_batch_tokens=(1, 4, 8), sample_steps_per_second=(1.0, 0.6, 0.4), max_batch_tokens=8)
    proposer = TorchProposer(tiny_drafter(target, 2))
    rival = TorchProposer(tiny_drafter(target, 1, markov="none"))

    def of(settings: LiveLoadSettings) -> LiveArms:
        return LiveArms.of(proposer, settings, scheduler=PrefixScheduler(curve, 2), rivals={"mtp1": rival})

    return of


def replayed(target: Target, clock: Clock, moments: list[float], slots: int) -> Any:
    settings = LiveLoadSettings(new_tokens=4, slots=slots)
    engine = LiveEngine(target, PROMPTS, settings, clock)
    arrivals = tuple(Arrival(moment, number % 4) for number, moment in enumerate(moments))
    return engine.replay(PLAIN, Trace(10.0, arrivals), Progress())


def test_who_comes_joins_between_two_cycles(target: Target, monkeypatch: pytest.MonkeyPatch):
    """Prefills and cycles take a second each, texts have four tokens. The second request comes at 2.5, in the first
    one's second cycle, is prefilled from 3 to 4 while the first one waits, and then they share cycles."""
    done = replayed(target, Clock(monkeypatch, lambda *_: 1.0, 1.0), [0.0, 2.5], slots=2)
    first, second = done.served
    assert (first.arrives, first.joins, first.first) == (0.0, 0.0, 1.0) and first.gaps.tolist() == [1, 1, 2]
    assert (second.arrives, second.joins, second.first) == (2.5, 3.0, 4.0) and second.gaps.tolist() == [1, 1, 1]
    assert [(step.begins, step.ends, step.rows, step.tokens, step.cycle) for step in done.steps] == [
        (0, 1, 1, 1, False), (1, 2, 1, 1, True), (2, 3, 1, 1, True), (3, 4, 1, 1, False),
        (4, 5, 2, 2, True), (5, 6, 1, 1, True), (6, 7, 1, 1, True),
    ]  # fmt: skip
    assert (done.seconds, first.ends, second.ends, done.tokens) == (7, 5, 7, 8)


def test_who_finds_no_slot_waits_and_who_comes_late_is_waited_for(target: Target, monkeypatch: pytest.MonkeyPatch):
    """One slot: the second request of time 0 is prefilled at 4, when the first one is done. The third comes at 30."""
    done = replayed(target, Clock(monkeypatch, lambda *_: 1.0, 1.0), [0.0, 0.0, 30.0], slots=1)
    assert [(one.joins, one.first, one.ends) for one in done.served] == [(0, 1, 4), (4, 5, 8), (30, 31, 34)]


def test_the_tokens_of_a_cycle_share_its_time(target: Target, arms, monkeypatch: pytest.MonkeyPatch):
    """Whole blocks of a second each: a cycle of two tokens is two gaps of half a second; verified are two each."""
    settings = LiveLoadSettings(new_tokens=12)
    engine = LiveEngine(target, PROMPTS, settings, Clock(monkeypatch, lambda *_: 1.0, 1.0))
    whole = arms(settings).lengths[-1]
    done = engine.replay(whole, Trace(5.0, (Arrival(0.0, 1),)), Progress())
    expected = decode(target, whole.proposer, [PROMPTS.token_ids[1]], max_new_tokens=12, policy=Fixed(2))[0]
    assert done.served[0].token_ids == tuple(expected.token_ids)
    gaps = [1 / count for count in expected.emitted for _ in range(count)]
    np.testing.assert_allclose(done.served[0].gaps, gaps)
    assert [step.verified for step in done.steps] == [0] + [2] * len(expected.cycles)
    assert [step.tokens for step in done.steps] == [1, *expected.emitted]


SETTINGS = LiveLoadSettings(
    requests=14, peak=3, new_tokens=6, rounds=3, intervals=6, requests_per_second=(0.1, 0.5),
    policies=("threshold(0.5)", "scheduled", "scheduled-delayed"),
)  # fmt: skip


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Blocks of two are dear, everything else costs as much as plain decoding: what drafts one token is faster."""
    return Clock(monkeypatch, lambda policy, rows: 4.0 if policy == "fixed(2)" else 1.0, 0.5)


def test_every_policy_is_asked_the_same_in_turn(target: Target, arms, cheap: Clock):
    report = live_load(target, arms(SETTINGS), PROMPTS, SETTINGS, clock=cheap)
    assert report.best_fixed == "fixed(1)" and set(report.selection_seconds_per_token) == {"fixed(1)", "fixed(2)"}
    names = ["none", "fixed(1)", "mtp1", "threshold(0.5)", "scheduled", "scheduled-delayed"]
    assert list(report.arms) == names
    order = [name if name != "mtp1" else "fixed" for name in names]
    ends = [*order, *reversed(order), *order]
    # An arm that ends a round also begins the next one, which does not show.
    assert cheap.ran[-16:] == [name for place, name in enumerate(ends) if place == 0 or name != ends[place - 1]]
    assert report.requests == 14 * 3 and report.requests_per_second == (0.1, 0.5) and report.gamma == 2
    for name, arm in report.arms.items():
        assert arm.same_text == (None if name == NONE else 1.0)
        assert set(arm.against) == {"none", "fixed(1)", "mtp1"} - {name}
        assert arm.tokens_per_second.n == 3
    assert report.arms["none"].verified_tokens_per_second.value == 0
    one = report.arms["fixed(1)"]
    assert one.against["none"].seconds_per_token.value < 1 < one.against["none"].tokens_per_second.value
    assert report.arms["mtp1"].policy == "fixed"


def test_the_timeline_adds_up_to_the_totals(target: Target, arms, cheap: Clock):
    """Tokens, verified drafts and arrivals of all intervals, and requests' seconds in the engine and before it."""
    settings = SETTINGS.model_copy(update={"policies": ("scheduled",), "rounds": 2})
    report = live_load(target, arms(settings), PROMPTS, settings, clock=cheap)
    width = report.seconds / SETTINGS.intervals
    for arm in report.arms.values():
        assert [one.seconds for one in arm.timeline] == pytest.approx([width * k for k in range(len(arm.timeline))])
        tokens = sum(one.tokens_per_second.value for one in arm.timeline) * width
        verified = sum(one.verified_tokens_per_second.value for one in arm.timeline) * width
        assert sum(one.arrivals_per_second for one in arm.timeline) * width == pytest.approx(14)
        assert tokens == pytest.approx(14 * 6)
        ratio = arm.verified_tokens_per_second.value / arm.tokens_per_second.value
        assert verified / tokens == pytest.approx(ratio)
        inside = sum(one.concurrency.value + one.waiting for one in arm.timeline) * width
        assert inside == pytest.approx(14 * 6 * arm.seconds_per_token.value)
        assert max(one.concurrency.value for one in arm.timeline) <= 3
        assert 0 < arm.busy <= 1
    plain = report.arms["none"].timeline
    assert max(one.concurrency.value for one in plain[2:4]) > plain[0].concurrency.value, "the load does not rise"
    assert plain[0].verified_tokens_per_request == 0
    assert report.arms["fixed(1)"].timeline[2].verified_tokens_per_request == pytest.approx(1)


def test_rates_are_measured_where_none_are_given(target: Target, arms, cheap: Clock):
    """Plainly, a request takes .5 + 5 s, one at a time; three together take the same, so three times as many come."""
    settings = SETTINGS.model_copy(update={"requests_per_second": None, "rounds": 2, "policies": ()})
    report = live_load(target, arms(settings), PROMPTS, settings, clock=cheap)
    assert report.requests_per_second == pytest.approx((1 / 5.5, 3 / 5.5))
    assert report.seconds == pytest.approx(14 * np.log(3) / (2 / 5.5))


def test_files_are_read_back_and_tables_hold_every_arm(target: Target, arms, cheap: Clock, tmp_path: Path):
    sampling = Sampling(temperature=1.0, top_k=5)
    settings = SETTINGS.model_copy(update={"policies": ("scheduled",), "sampling": sampling, "rounds": 2})
    report = live_load(target, arms(settings), PROMPTS, settings, clock=cheap)
    assert report.arms["scheduled"].same_text is None, "samples of different policies differ"
    write_report(tmp_path, report)
    assert read_model(tmp_path / "live.json", LiveReport) == report
    with (tmp_path / "timeline.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["arm"] for row in rows] == [name for name, arm in report.arms.items() for _ in arm.timeline]
    assert float(rows[0]["concurrency_low"]) <= float(rows[0]["concurrency"]) <= float(rows[0]["concurrency_high"])
    with (tmp_path / "summary.csv").open(newline="") as handle:
        totals = {row["arm"]: row for row in csv.DictReader(handle)}
    assert float(totals["mtp1"]["itl_p95_seconds"]) == report.arms["mtp1"].itl_seconds.p95.value


def test_percentiles_of_resampled_rounds_are_those_of_their_values():
    generator = np.random.default_rng(3)
    rounds = [generator.exponential(size=size) for size in (7, 0, 40, 13)]
    pooled = _Pooled(rounds)
    for _ in range(20):
        chosen = generator.integers(0, 4, 4)
        values = np.concatenate([rounds[index] for index in chosen])
        if len(values):
            for share in (0.5, 0.95, 0.99):
                assert pooled.at(share, chosen) == np.percentile(values, 100 * share, method="inverted_cdf")


def test_loads_that_cannot_be_measured_are_refused(target: Target, arms, cheap: Clock):
    def refused(kind: type[Exception], match: str, prompts: Prompts = PROMPTS, **changes: Any) -> None:
        settings = SETTINGS.model_copy(update=changes)
        with pytest.raises(kind, match=match):
            live_load(target, arms(settings), prompts, settings, clock=cheap)

    refused(SettingsError, "need different names", policies=("fixed(1)",))
    refused(DataError, "no prompt to ask", Prompts([], []))
    refused(DataError, "no prompt of domain law", domains=("law",))
    refused(DataError, "nobody came", requests=None, seconds=1e-3)
    refused(DataError, "125 tokens; with 6 more", Prompts([[5] * 125], ["code"]))
    target.eos_token_ids = frozenset(range(40))
    try:
        refused(DataError, "no request said a second token")
    finally:
        target.eos_token_ids = frozenset()


def test_a_requested_stop_is_obeyed_while_nobody_comes(target: Target, monkeypatch: pytest.MonkeyPatch):
    class Stopped(Progress):
        def advance(self, count: int = 1, **fields: Any) -> None:
            if clock.seconds > 3:
                raise Interrupted("stopped at a safe point")

    clock = Clock(monkeypatch, lambda *_: 1.0, 1.0)
    engine = LiveEngine(target, PROMPTS, LiveLoadSettings(), clock)
    with pytest.raises(Interrupted):
        engine.replay(PLAIN, Trace(1000.0, (Arrival(1000.0, 0),)), Stopped())
    assert clock.seconds < 4
