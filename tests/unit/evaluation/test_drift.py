"""Drift: the rate of false alarms, what is found, and what is refused a comparison."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # traffic.py

import traffic
from traffic import GAMMA, RATES, entry, records, requests, scrape, window

from dspark.config.models import Sampling
from dspark.evaluation import dispersion, drift
from dspark.evaluation.cause import cause_of
from dspark.evaluation.certified import certified_acceptance
from dspark.evaluation.dispersion import Spread, critical, spread_of_position, spread_of_tau
from dspark.evaluation.drift import FALSE_ALARMS, judge_drift
from dspark.evaluation.mixture import explain
from dspark.measured import Measured

PLACES = [f"acceptance at {place + 1}" for place in range(GAMMA)]


def number(value, error=0.1):
    return Measured(value=value, n=8, ci95=(value - error, value + error))


def judge(live, certified, **settings):
    return judge_drift(live, window(live), certified, GAMMA, **settings)


@pytest.fixture(scope="module")
def certified():
    return entry(requests(np.random.default_rng(1), 96, steps=30))


@pytest.fixture(scope="module")
def told():
    """Records of single prompts."""
    return records(requests(np.random.default_rng(2), 96, steps=30))


def alarms(generator, told, *, certificates=30, checks=7, count=80):
    """How many checks of a server find drift, whose traffic is exactly what was certified."""
    found = 0
    for _ in range(certificates):
        certified = entry(requests(generator, 24, steps=30))
        for _ in range(checks):
            live = scrape(requests(generator, count, steps=150, exponential=True))
            found += judge(live, certified, records=told).verdict == "drifted"
    return found


def test_an_unchanged_server_raises_as_few_alarms_as_stated(told):
    """210 checks at 1 % are 2 on average; more than 8 have a chance of 4e-4 (binomial), were they independent."""
    assert FALSE_ALARMS == 0.01
    assert alarms(np.random.default_rng(3), told) <= 8


def test_requests_that_differ_are_what_the_rate_rests_on(told, monkeypatch):
    """A mutant that takes steps for independent ones, as a binomial interval does, cries wolf over and over.

    Certificates of 24 prompts hide most of it, so that these have hardly an error of their own.
    """
    generator = np.random.default_rng(4)
    sure = entry(requests(generator, 2000, steps=30))
    lives = [scrape(requests(generator, 80, steps=150, exponential=True)) for _ in range(60)]
    assert sum(judge(live, sure, records=told).verdict == "drifted" for live in lives) <= 3
    for name, function in (("spread_of_tau", spread_of_tau), ("spread_of_position", spread_of_position)):
        monkeypatch.setattr(drift, name, lambda *given, spread=function: replace(spread(*given), between=0.0))
    assert sum(judge(live, sure, records=told).verdict == "drifted" for live in lives) >= 15


def test_the_spread_between_requests_is_what_the_traffic_was_made_with():
    """Acceptance at the first place is Bernoulli(p), p from two beta distributions: its moments are known."""
    found = spread_of_position(records(requests(np.random.default_rng(5), 3000, steps=30)), 0)
    rates = list(RATES.values())
    inside = [rate * (1 - rate) / (traffic.SPREAD + 1) for rate in rates]
    between = float(np.mean(inside) + np.var(rates))
    assert found.between == pytest.approx(between, rel=0.1)
    assert found.within == pytest.approx(np.mean([rate * (1 - rate) for rate in rates]) - np.mean(inside), rel=0.02)
    assert (found.prompts, found.source) == (3000, "records")


def test_too_few_records_tell_no_spread():
    generator = np.random.default_rng(6)
    assert spread_of_tau(records(requests(generator, 1, steps=30))) is None
    assert spread_of_tau(records(requests(generator, 5, steps=1))) is None


@pytest.mark.parametrize(
    ("alarms", "prompts", "expected"),
    [(0.05, 10, 2.262), (0.01, 24, 2.807), (0.01, 6, 4.032), (0.001, 31, 3.646), (0.05, 100000, 1.960)],
)
def test_critical_values_are_those_of_students_tables(alarms, prompts, expected):
    assert critical(alarms, prompts) == pytest.approx(expected, rel=0.002)


def test_very_few_prompts_decide_nothing():
    assert critical(0.01, 5) == math.inf
    live = scrape(requests(np.random.default_rng(7), 100, steps=100, rates={"x": 0.1}))
    found = judge(live, entry(requests(np.random.default_rng(7), 4, steps=30)))
    assert found.verdict == "not comparable"
    assert "rests on 4 prompts, too few" in found.quantities[0].reason


def test_domains_are_pooled_by_their_shares_of_the_steps(certified):
    """math has tau 2 and chat tau 1.5: replies of one length have 3 steps against 4, so survival weighs 3/7 to 4/7."""

    def domain(tau, first, second):
        return traffic.Acceptance(
            tau=number(tau),
            conditional=(number(first), number(second / first)),
            marginal=(number(first), number(second)),
        )

    domains = {"math": domain(2.0, 0.7, 0.42), "chat": domain(1.5, 0.35, 0.07)}
    one = certified.model_copy(update={"acceptance": domains, "offline_vs_engine": None})
    found = certified_acceptance(one, 2, cut=False)
    assert found.tau.value == pytest.approx(12 / 7)
    assert found.marginal == pytest.approx((0.5, 0.22))
    assert [rate.value for rate in found.conditional] == pytest.approx([0.5, 0.22 / 0.5])
    assert found.not_verified == 0


def test_the_same_traffic_is_within_and_says_what_would_have_been_seen(certified, told):
    live = scrape(requests(np.random.default_rng(8), 300, steps=60, exponential=True))
    found = judge(live, certified, records=told)
    assert found.verdict == "within" and found.mixture is None
    assert [one.name for one in found.quantities] == ["tau", *PLACES]
    tau = found.quantities[0]
    assert tau.live.value == pytest.approx(1 + live.accepted / live.steps) and tau.live.n == 300
    assert tau.live.ci95[0] < tau.live.value < tau.live.ci95[1] and 0 < tau.detectable < 0.5
    assert any("exponential distribution" in line and "single prompts" in line for line in found.assumptions)


@pytest.mark.parametrize(("rates", "verdict"), [({"a": 0.3}, "below"), ({"a": 0.9}, "above")])
def test_other_traffic_is_found_and_is_no_mixture_of_the_certified(certified, told, rates, verdict):
    live = scrape(requests(np.random.default_rng(9), 300, steps=60, rates=rates, exponential=True))
    found = judge(live, certified, records=told)
    assert found.verdict == "drifted" and {one.verdict for one in found.quantities} == {verdict}
    assert found.mixture.inside == verdict and found.mixture.shares == {}
    cause = cause_of(found, (), {})
    assert cause.kind == "domain shift" and "no mixture of the certified domains" in cause.text


def test_traffic_that_moved_between_the_domains_is_explained_by_their_mixture(certified, told):
    """Only chat, of a certificate with as much math: its share is found from tau and survival."""
    live = scrape(requests(np.random.default_rng(10), 800, steps=60, rates={"chat": 0.45}, exponential=True))
    found = judge(live, certified, records=told)
    assert found.quantities[0].verdict == "below" and found.mixture.inside == "yes"
    assert found.mixture.shares.get("chat", 0) > 0.85
    assert "between the certified domains" in cause_of(found, (), {}).text


def test_a_mixture_of_three_domains_is_found():
    """A point that is made of three corners has no other weights: they do not lie on a line."""
    corners = {"a": (2.0, 0.8, 0.2), "b": (1.5, 0.3, 0.2), "c": (2.4, 0.8, 0.6)}
    domains = {
        name: traffic.Acceptance(tau=number(tau), conditional=(), marginal=tuple(map(number, rest)))
        for name, (tau, *rest) in corners.items()
    }
    tau, *survival = 0.5 * np.array(corners["a"]) + 0.3 * np.array(corners["b"]) + 0.2 * np.array(corners["c"])
    found = explain(Measured(value=tau, n=100, ci95=(tau - 0.1, tau + 0.1)), survival, domains)
    assert found.inside == "yes" and found.shares == {"a": 0.5, "b": 0.3, "c": 0.2}


def test_another_engine_is_suspected_before_the_traffic(certified, told):
    live = scrape(requests(np.random.default_rng(9), 300, steps=60, rates={"a": 0.3}))
    found = judge(live, certified, records=told)
    cause = cause_of(found, ("kv_dtype: certified bfloat16, here fp8",), {})
    assert cause.kind == "engine change" and "kv_dtype: certified bfloat16, here fp8" in cause.text
    silent = cause_of(found, None, {}, silent="a file says nothing")
    assert silent.kind == "unknown" and silent.text.startswith("a file says nothing; if the engine")


def test_a_tau_like_that_of_sampled_traffic_is_pointed_at(certified, told):
    live = scrape(requests(np.random.default_rng(9), 300, steps=60, rates={"a": 0.3}))
    found = judge(live, certified, records=told)
    sampled = Measured(value=found.quantities[0].live.value, n=90, ci95=(1.0, 2.0))
    assert "sampling at temperature 1 would look so as well" in cause_of(found, (), {"1": sampled}).text
    far = sampled.model_copy(update={"value": 3.9})
    assert "sampling" not in cause_of(found, (), {"1": far}).text


def test_as_many_more_requests_as_said_do_decide(certified, told):
    """The same counts so many times over: just enough with what was said, and not with 2 % fewer."""
    generator = np.random.default_rng(11)
    live = scrape(requests(generator, 40, steps=60, rates={"math": 0.58, "chat": 0.38}))
    first = judge(live, certified, records=told).quantities[0]
    assert first.verdict == "within" and first.more_requests

    def times(factor):
        counts = {
            name: round(getattr(live, name) * factor) for name in ("steps", "accepted", "drafted", "tokens", "ended")
        }
        positions = tuple(round(count * factor) for count in live.per_position)
        return judge(replace(live, **counts, per_position=positions), certified, records=told).quantities[0]

    needed = (40 + first.more_requests) / 40
    assert times(needed * 1.02).verdict == "below" and times(needed * 1.02).more_requests == 0
    assert times(needed * 0.98).verdict == "within"


def test_a_difference_within_the_certificates_own_error_is_never_decided(certified, told):
    live = scrape(requests(np.random.default_rng(12), 300, steps=60))
    for one in judge(live, certified, records=told).quantities:
        assert one.verdict == "within"
        if abs(one.live.value - one.certified.value) < (one.certified.ci95[1] - one.certified.ci95[0]) / 2:
            assert one.more_requests is None


def plain(**changes):
    return scrape(requests(np.random.default_rng(13), 60, steps=60), **changes)


@pytest.mark.parametrize(
    ("live", "changes", "reason"),
    [
        (plain(steps=0, accepted=0), {}, "speculation is off: "),
        (plain(steps=0, accepted=0, tokens=0), {}, "generated nothing in this window"),
        (plain(drafted=60 * 60 * 2), {}, r"2.00 of 3 drafts were verified in a step"),
        (plain(window=3.2), {}, r"a scheduler let 2.20 of 3 drafts be verified"),
        (plain(), {"status": "disagrees"}, "entry h100 is disagrees: tau is far off"),
        (plain(), {"policy": "scheduled"}, "verifies whole blocks, certified was policy scheduled"),
    ],
)
def test_what_is_not_the_same_quantity_is_not_compared(live, changes, reason):
    certified = entry(requests(np.random.default_rng(13), 24, steps=30), **changes)
    found = judge(live, certified)
    assert found.verdict == "not comparable"
    for one in found.quantities:
        assert one.verdict == "not comparable" and one.live is None
        assert re.search(reason, one.reason)


def test_blocks_of_another_size_are_not_compared(certified):
    found = judge(plain(), certified, served_gamma=7)
    assert found.verdict == "not comparable" and "blocks of 7, the drafter's gamma is 3" in found.quantities[0].reason
    assert judge(plain(), certified, served_gamma=GAMMA).verdict == "within"


def test_under_a_scheduler_tau_at_the_certified_policy_is_all_that_is_compared():
    certified = entry(requests(np.random.default_rng(14), 24, steps=30), policy="scheduled")
    found = judge(plain(drafted=60 * 60 * 2), certified)
    assert found.quantities[0].verdict == "within"
    assert {one.verdict for one in found.quantities[1:]} == {"not comparable"}
    assert "which places were verified" in found.quantities[1].reason
    assert "the server runs policy scheduled, as certified: counters do not tell" in found.assumptions


def test_few_requests_and_rare_places_wait_for_more(certified):
    few = judge(scrape(requests(np.random.default_rng(15), 12, steps=60)), certified)
    assert few.verdict == "not comparable" and few.quantities[0].more_requests == 8
    rare = judge(scrape(requests(np.random.default_rng(15), 30, steps=4, rates={"a": 0.3})), certified)
    late = rare.quantities[GAMMA]
    assert late.verdict == "not comparable" and "blocks reached it" in late.reason and late.more_requests > 0


def sglang(found):
    """As SGLang counts: nothing of a last block but the token that ended the reply."""
    kept = sum(int(one[:-1].sum()) for one in found)
    steps = sum(map(len, found))
    return scrape(
        found, "sglang", accepted=kept, drafted=None, per_position=None, cut_replies=len(found),
        tokens=kept + steps + len(found),
    )  # fmt: skip


def test_what_sglang_leaves_out_at_the_ends_is_no_fall(certified, told):
    """Replies of six steps lose a sixth of what they accept, which looks like a fall, and could be none."""
    short = judge(sglang(requests(np.random.default_rng(16), 2000, steps=6)), certified, records=told)
    tau = short.quantities[0]
    assert tau.verdict == "within" and tau.unsure == pytest.approx(GAMMA / 6)
    assert tau.live.ci95[1] - tau.live.value > tau.unsure
    assert "does not count by place" in short.quantities[1].reason
    fallen = judge(sglang(requests(np.random.default_rng(16), 300, steps=100, rates={"a": 0.3})), certified)
    assert fallen.verdict == "drifted" and fallen.quantities[0].verdict == "below"


def cut(found, generator):
    """As llama.cpp counts: the last block of a reply is cut to a random length, from one draft on."""
    lengths = generator.integers(1, GAMMA + 1, len(found))
    done = [np.append(one[:-1], min(one[-1], length)) for one, length in zip(found, lengths, strict=True)]
    live = scrape(done, "llamacpp")
    return replace(live, drafted=live.drafted - int((GAMMA - lengths).sum()), ended=None, longest=10_000)


def test_what_llamacpp_cuts_at_the_ends_is_no_fall(told):
    """Replies of 8 steps cut one block in eight, the certificate none: half a percent of tau, which is allowed for."""
    generator = np.random.default_rng(17)
    sure = entry(requests(generator, 4000, steps=30), engine="llamacpp")
    live = cut(requests(generator, 4000, steps=8), generator)
    found = judge(live, sure, records=told)
    assert found.verdict == "within" and found.quantities[0].unsure > 0
    # 4000 requests, of which half are sure to be some: each has one token that no step yields.
    assert live.requests == 2000 and "at least so many" in found.assumptions[-1]


def test_a_policy_that_drafts_less_is_seen_through_llamacpps_cuts(certified):
    live = cut(requests(np.random.default_rng(18), 100, steps=8), np.random.default_rng(18))
    assert judge(live, certified).quantities[0].verdict != "not comparable"
    assert judge(replace(live, drafted=2 * live.steps), certified).verdict == "not comparable"
    # Whole blocks or none, by `--spec-draft-n-min`: every counted block is whole, and a third of the tokens of none.
    gaps = judge(replace(live, tokens=round(live.tokens * 1.5)), certified)
    assert gaps.verdict == "not comparable" and "came without a drafted block" in gaps.quantities[0].reason


def test_without_records_the_certificates_intervals_have_to_do(certified):
    live = scrape(requests(np.random.default_rng(19), 300, steps=60))
    found = judge(live, certified)
    assert found.verdict == "within"
    assert any("the certificate's intervals" in line for line in found.assumptions)


def test_the_sampling_that_is_taken_for_granted_is_said():
    certified = entry(requests(np.random.default_rng(20), 24, steps=30))
    warm = certified.workload.model_copy(update={"sampling": Sampling(temperature=0.7)})
    found = judge(plain(), certified.model_copy(update={"workload": warm}))
    assert found.assumptions[0].startswith("the traffic is sampled at temperature 0.7")


def test_variance_falls_with_requests_and_not_with_steps_alone():
    spread = Spread(within=0.6, between=0.04, prompts=24, source="records")
    assert spread.variance(1000, 10) == pytest.approx(0.0006 + 0.04 * (1 + dispersion.LENGTHS) / 10)
    assert spread.variance(1e9, 10) > 0.004
