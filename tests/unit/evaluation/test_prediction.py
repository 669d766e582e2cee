"""Predictions against closed forms, an exact expectation, and the real loop on a clock that costs what is predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decoding.history import History, Timing
from dspark.decoding.policies import Fixed, NoDrafts, Policy, Scheduled, ScheduledDelayed, Threshold
from dspark.decoding.prefixes import Counts
from dspark.decoding.records import Decoded
from dspark.errors import DataError, SettingsError
from dspark.evaluation.prediction import Recorded, predict
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.delayed import DelayedPrefixScheduler
from dspark.scheduling.prefix import PrefixScheduler

EOS = 1


class Flat:
    """Every cycle takes as long, whatever is in it."""

    def drafting(self, lengths: Counts, contexts: Counts) -> float:
        return 0.1

    def plain(self, contexts: Counts) -> float:
        return 0.04


class PerRow(Flat):
    """A second for each request."""

    def drafting(self, lengths: Counts, contexts: Counts) -> float:
        return float(len(lengths))


def recorded(*prompts: tuple[int, list[int]], gamma: int, logit: float = 0.0) -> Recorded:
    """Prompts of (tokens of the answer, drafts accepted in each cycle)."""
    counts = np.array([len(accepted) for _, accepted in prompts])
    return Recorded(
        prompt_tokens=np.full(len(prompts), 10),
        new_tokens=np.array([tokens for tokens, _ in prompts]),
        first=np.cumsum(counts) - counts,
        cycles=counts,
        accepted=np.array([count for _, accepted in prompts for count in accepted]),
        confidence_logits=np.full((counts.sum(), gamma), logit, np.float32),
    )


# Of drafts that are each accepted with probability 1/2: none, one, two or three of three, in 4, 2, 1 and 1 of 8 cycles.
HALF = [0, 0, 0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(("length", "tau"), [(1, 1.5), (2, 1.75), (3, 1.875)])
def test_geometric_acceptance_gives_the_geometric_sum(length: int, tau: float):
    """tau = (1 - p^(k+1)) / (1 - p) with p = 1/2; with a flat cost T one request gets tau / T tokens per second."""
    found = predict(recorded((8001, HALF), gamma=3), Fixed(length), 1, Flat(), rounds=4)
    assert found.tau == pytest.approx(tau, rel=0.02)
    assert found.tokens_per_second == pytest.approx(found.tau / 0.1)
    assert found.latency_per_token_seconds == pytest.approx(0.1 / found.tau)
    assert found.verified_tokens_per_request == length


def test_requests_that_end_early_leave_a_smaller_batch():
    """Blocks of 3, cycles of a second per request. The one that always accepts two says 6 tokens after its first in two
    cycles, the one that accepts none says 3 in three: cycles take 2, 2 and 1 s, 9 tokens in 5 s, in 4 + 5 s of
    requests; five times a request was in a cycle."""
    found = predict(recorded((7, [2]), (4, [0]), gamma=3), Fixed(), 2, PerRow(), rounds=3)
    assert found.tau == pytest.approx(9 / 5)
    assert found.tokens_per_second == pytest.approx(9 / 5)
    assert found.tokens_per_second_per_user == pytest.approx(1)
    assert found.latency_per_token_seconds == pytest.approx(1)
    assert found.verified_tokens_per_request == 3


def test_the_last_cycle_says_no_more_than_the_answer_has():
    """5 tokens after the first in cycles of 3: two cycles, 2.5 tokens each."""
    assert predict(recorded((6, [2]), gamma=3), Fixed(), 1, Flat(), rounds=1).tau == pytest.approx(2.5)


def test_plain_decoding_says_one_token_a_cycle_at_its_own_cost():
    found = predict(recorded((9, HALF), (9, HALF), gamma=3), NoDrafts(), 2, Flat())
    assert (found.tau, found.verified_tokens_per_request) == (1, 0)
    assert found.tokens_per_second == pytest.approx(2 / 0.04)
    assert found.latency_per_token_seconds == pytest.approx(0.04)


def test_an_answer_without_a_second_token_takes_no_cycle():
    found = predict(recorded((1, []), (4, [0]), gamma=3), Fixed(), 2, PerRow(), rounds=2)
    assert found.tokens_per_second == pytest.approx(1)
    with pytest.raises(DataError, match="no recorded answer has a second token"):
        predict(recorded((1, []), gamma=3), Fixed(), 1, Flat())


def test_short_answers_agree_with_the_exact_expectation():
    """Of one request: tokens over expected cycles, which dynamic programming over the tokens left gives exactly."""
    tokens = 5

    @cache
    def cycles(left: int) -> float:
        return 0.0 if left <= 0 else 1 + sum(cycles(left - 1 - accepted) for accepted in HALF) / len(HALF)

    found = predict(recorded((tokens + 1, HALF), gamma=3), Fixed(), 1, Flat(), rounds=4000)
    assert found.tau == pytest.approx(tokens / cycles(tokens), rel=0.01)


def test_a_policy_that_looks_at_the_whole_batch_is_asked_with_it():
    """SPS 1, 0.9, 0.5: of two requests only one may verify a draft more than pays. Confidences are 3/4 and 1/4 (logits
    of 1.0986 and -1.0986), so theta is 2, 2.75 * 0.9 = 2.475, then 3 * 0.5: the first prompt verifies its draft."""
    curve = CostCurve(sample_batch_tokens=(2, 3, 4), sample_steps_per_second=(1.0, 0.9, 0.5), max_batch_tokens=4)
    two = recorded((3, [1]), (3, [0]), gamma=1)
    two = replace(two, confidence_logits=np.array([[1.0986], [-1.0986]], np.float32))
    found = predict(two, Scheduled(PrefixScheduler(curve, 1)), 2, PerRow(), rounds=5)
    # First cycle: one draft verified of two requests. Then the first one is done, and the second one alone, of which
    # the curve says nothing below two tokens, verifies its draft at 0.25 for free.
    assert found.verified_tokens_per_request == pytest.approx(2 / 3)
    assert found.tau == pytest.approx(4 / 3)


def test_a_policy_with_a_memory_begins_every_round_anew():
    curve = CostCurve(sample_batch_tokens=(1, 4, 8), sample_steps_per_second=(1.0, 0.6, 0.4), max_batch_tokens=8)
    policy = ScheduledDelayed(DelayedPrefixScheduler(curve, 3))
    sample = recorded((20, HALF), (30, HALF), gamma=3)
    first = predict(sample, policy, 2, PerRow(), rounds=3)
    assert predict(sample, policy, 2, PerRow(), rounds=3) == first


POLICIES = (Fixed(1), Fixed(2), Fixed(), Threshold(0.5))
CYCLES = st.lists(st.integers(0, 3), min_size=1, max_size=6)
PROMPTS = st.lists(st.tuples(st.integers(2, 12), CYCLES), min_size=1, max_size=3)


@settings(max_examples=60)
@given(prompts=PROMPTS, concurrency=st.integers(1, 4), policy=st.sampled_from(POLICIES), logit=st.sampled_from([-1, 1]))
def test_tau_and_verified_drafts_stay_within_a_block(
    prompts: list[tuple[int, list[int]]], concurrency: int, policy: Policy, logit: float
):
    found = predict(recorded(*prompts, gamma=3, logit=logit), policy, concurrency, PerRow(), rounds=2)
    assert 1 <= found.tau <= found.verified_tokens_per_request + 1 + 1e-9
    assert found.verified_tokens_per_request <= 3
    assert found.tokens_per_second_per_user * found.latency_per_token_seconds == pytest.approx(1)
    # Nobody is served faster than by the whole engine.
    assert found.tokens_per_second_per_user <= found.tokens_per_second * (1 + 1e-9)


@settings(max_examples=60)
@given(prompts=PROMPTS, concurrency=st.integers(1, 4), policy=st.sampled_from(POLICIES), data=st.data())
def test_more_accepted_drafts_are_never_slower(
    prompts: list[tuple[int, list[int]]], concurrency: int, policy: Policy, data: st.DataObject
):
    sample = recorded(*prompts, gamma=3, logit=1.0)
    more = [data.draw(st.integers(count, 3)) for count in sample.accepted.tolist()]
    before = predict(sample, policy, concurrency, Flat(), rounds=2)
    after = predict(replace(sample, accepted=np.array(more)), policy, concurrency, Flat(), rounds=2)
    assert after.tau >= before.tau - 1e-12
    assert after.tokens_per_second >= before.tokens_per_second * (1 - 1e-12)


# ---------------------------------------------------------------- records


def request(accepted: list[int], *, limit: int = 10_000, ends_inside: bool = False, verified: int = 3) -> Decoded:
    """An answer that accepts so many of three drafts in each cycle and ends by an eos, inside the last block or not."""
    one = History(4, 3, limit, frozenset({EOS}), 0.0, "fixed")
    one.begin(5, 0.1)
    for number, count in enumerate(accepted):
        last = number + 1 == len(accepted)
        drafts = [EOS, 7, 7] if last and ends_inside else [7, 7, 7]
        following = EOS if last and not ends_inside and limit == 10_000 else 8
        one.add(drafts, verified, count, following, np.full(3, number, np.float32), Timing(0.1, 0.1, 1))
    return one.result()


def test_a_block_in_which_an_answer_ends_does_not_tell_how_far_it_would_have_gone():
    found = Recorded.of([request([0, 2, 3], ends_inside=True), request([1, 3])], 100)
    assert found.accepted.tolist() == [0, 2, 1, 3]
    assert found.confidence_logits[:, 0].tolist() == [0, 1, 0, 1]
    assert (found.first.tolist(), found.cycles.tolist()) == ([0, 2], [2, 2])
    assert found.new_tokens.tolist() == [1 + 1 + 3 + 1, 1 + 2 + 4]
    assert found.prompt_tokens.tolist() == [4, 4] and found.gamma == 3
    # Where there is no other block, it has to do.
    assert Recorded.of([request([2], ends_inside=True)], 100).accepted.tolist() == [1]


@pytest.mark.parametrize(("limit", "accepted"), [(10_000, [2, 3, 1]), (7, [2, 3])])
def test_a_block_that_drafts_an_end_is_left_out_whatever_became_of_it(limit: int, accepted: list[int]):
    """Kept where the end is rejected and left out where it is accepted, such blocks would only ever add rejections.

    The first token, 2 + 1 of the first block and 1 of the second make 5: a limit of 7 cuts the third block, which
    tells all the same how many of its drafts were accepted.
    """
    one = History(4, 3, limit, frozenset({EOS}), 0.0, "fixed")
    one.begin(5, 0.1)
    for drafts, right, following in (([7, 7, 7], 2, 8), ([EOS, 7, 7], 0, 8), ([7, 7, 7], 3, 8), ([7, 7, 7], 1, EOS)):
        if one.finish_reason is None:
            one.add(drafts, 3, right, following, np.zeros(3, np.float32), Timing(0.1, 0.1, 1))
    assert Recorded.of([one.result()], 7).accepted.tolist() == accepted


def test_answers_are_as_long_as_asked_for_and_no_longer_than_recorded():
    cut = request([3, 3], limit=7)
    assert Recorded.of([cut], 5).new_tokens.tolist() == [5]
    assert Recorded.of([cut], 7).accepted.tolist() == [3, 3]  # the limit says nothing about the drafts
    with pytest.raises(SettingsError, match="answers of 8 tokens cannot be predicted from records of 7 at most"):
        Recorded.of([cut, request([1])], 8)


def test_records_that_tell_nothing_are_refused():
    with pytest.raises(DataError, match="say nothing of drafts that were not verified"):
        Recorded.of([request([1], verified=2)], 4)
    silent = History(4, 3, 9, frozenset({EOS}), 0.0, "fixed")
    silent.begin(EOS, 0.1)
    with pytest.raises(DataError, match="no recorded answer has a second token"):
        Recorded.of([silent.result()], 4)


def test_shorter_blocks_are_the_first_drafts_of_longer_ones():
    found = recorded((20, HALF), gamma=3).cut(2)
    assert found.gamma == 2 and found.accepted.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    with pytest.raises(SettingsError, match="blocks of 2 drafts say nothing of 3"):
        found.cut(3)
