"""Scheduling by an additive cost of requests and tokens, against every allocation that there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.scheduling import AdditiveCost, CostCurve, DelayedPrefixScheduler, PrefixScheduler

GOLDEN = AdditiveCost(
    bias_seconds=0.01, requests=(1, 4), alpha_seconds=(0, 0.003), tokens=(2, 8), theta_seconds=(0, 0.006)
)
SURVIVAL = np.cumprod([[0.9, 0.8, 0.5], [0.6, 0.5, 0.4]], axis=1)


def test_the_delayed_scheduler_plans_sglangs_own_example():
    """engine-formats.md, 1.3, executed against SGLang 0.5.23: budget 4, 305.33 tokens/s, windows 4 and 2."""
    scheduler = DelayedPrefixScheduler(GOLDEN, 3, lag=1)
    assert scheduler.capacity(SURVIVAL) == 4
    scheduler.step(SURVIVAL)
    plan = scheduler.step(SURVIVAL)
    assert plan.lengths.tolist() == [3, 1]
    assert plan.tokens_per_second == pytest.approx(305.33, abs=0.005)
    assert plan.tokens_per_second_without == pytest.approx(2 / 0.011)


def test_requests_decide_where_a_curve_of_tokens_cannot_see_them():
    """A token costs 2 ms beside 10 ms of a step for one request, and beside 40 ms for four."""
    cost = AdditiveCost(
        bias_seconds=0.01, requests=(1, 4), alpha_seconds=(0, 0.03), tokens=(1, 20), theta_seconds=(0, 0.038)
    )
    scheduler = PrefixScheduler(cost, 3)
    one = [[0.18, 0.0, 0.0]]
    assert scheduler.lengths(one).tolist() == [0]  # 1 / 10 ms without, 1.18 / 12 ms with the draft
    assert scheduler.lengths(one * 4).tolist() == [1, 1, 1, 1]  # 4 / 46 ms without, 4.72 / 54 ms with four


@st.composite
def steps(draw):
    """A cost of both axes and the survival of a step, with ties, certainties and impossible tokens."""
    rises = st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=1, max_size=4)
    theta = [0.0, *np.cumsum([0.002, *draw(rises)]).tolist()]
    tokens = draw(st.lists(st.integers(1, 14), min_size=len(theta), max_size=len(theta), unique=True))
    requests = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True))
    alpha = draw(st.lists(st.sampled_from([-0.002, 0.0, 0.003, 0.01]), min_size=len(requests), max_size=len(requests)))
    cost = AdditiveCost(
        bias_seconds=0.005, requests=sorted(requests), alpha_seconds=alpha, tokens=sorted(tokens), theta_seconds=theta
    )
    gamma = draw(st.integers(1, 3))
    row = st.lists(st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0]), min_size=gamma, max_size=gamma)
    survival = np.cumprod(draw(st.lists(row, min_size=1, max_size=4)), axis=1)
    return cost, survival


def interpolated(probes, values, at):
    """Between two probes the straight line, beyond them the end: written out without the library."""
    if at <= probes[0]:
        return values[0]
    for (left, low), (right, high) in itertools.pairwise(zip(probes, values, strict=True)):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return values[-1]


def throughput(cost, survival, lengths):
    """Expected tokens per second of an allocation."""
    running, verified = len(survival), sum(lengths)
    seconds = cost.bias_seconds + interpolated(cost.requests, cost.alpha_seconds, running)
    seconds += interpolated(cost.tokens, cost.theta_seconds, running + verified)
    return (running + sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))) / seconds


def allocations(cost, survival):
    """Every allocation that the measured steps cover."""
    room = max(cost.tokens[-1] - len(survival), 0)
    every = itertools.product(range(survival.shape[1] + 1), repeat=len(survival))
    return [lengths for lengths in every if sum(lengths) <= room]


@settings(max_examples=150)
@given(steps())
def test_no_allocation_beats_the_capacity_that_the_delayed_scheduler_chooses(step):
    """With the same confidences for capacity and step, its plan is the best of all allocations."""
    cost, survival = step
    scheduler = DelayedPrefixScheduler(cost, survival.shape[1], lag=1)
    scheduler.step(survival)
    plan = scheduler.step(survival)
    best = max(throughput(cost, survival, lengths) for lengths in allocations(cost, survival))
    assert throughput(cost, survival, plan.lengths) == pytest.approx(best, rel=1e-9)
    assert plan.tokens_per_second == pytest.approx(best, rel=1e-9)


@settings(max_examples=150)
@given(steps())
def test_the_early_stop_takes_the_best_allocation_of_each_size_until_one_more_token_does_not_pay(step):
    cost, survival = step
    by_size = {}
    for lengths in allocations(cost, survival):
        value = throughput(cost, survival, lengths)
        by_size[sum(lengths)] = max(value, by_size.get(sum(lengths), 0.0))
    plan = PrefixScheduler(cost, survival.shape[1]).plan(survival)
    assert throughput(cost, survival, plan.lengths) == pytest.approx(by_size[plan.budget], rel=1e-9)
    for size in range(plan.budget):
        assert by_size[size + 1] > by_size[size] * (1 - 1e-9)
    if plan.budget + 1 in by_size:
        assert by_size[plan.budget + 1] <= by_size[plan.budget] * (1 + 1e-9)


def test_a_cost_that_does_not_know_requests_schedules_as_the_curve_that_it_is():
    """Probed at every number of tokens, with alpha 0 everywhere, the two say the same of every step."""
    seconds = (0.010, 0.011, 0.011, 0.013, 0.013, 0.02, 0.021, 0.022)
    tokens = tuple(range(1, 9))
    curve = CostCurve(
        sample_batch_tokens=tokens, sample_steps_per_second=tuple(1 / one for one in seconds), max_batch_tokens=8
    )
    cost = AdditiveCost(
        bias_seconds=0.01, requests=(1,), alpha_seconds=(0.0,), tokens=tokens,
        theta_seconds=tuple(one - 0.01 for one in seconds),
    )  # fmt: skip
    random = np.random.default_rng(3)
    for _ in range(50):
        survival = np.cumprod(random.random((random.integers(1, 4), 3)) ** 0.3, axis=1)
        for kind in (PrefixScheduler, DelayedPrefixScheduler):
            assert np.array_equal(*(kind(one, 3).lengths(survival) for one in (cost, curve)))


def test_a_step_goes_no_further_than_what_was_measured():
    """Beyond 8 tokens theta stays what it was, so every draft would look free; beyond 4 requests likewise."""
    certain = np.ones((3, 7))
    assert PrefixScheduler(GOLDEN, 7).plan(certain).budget == 5
    assert DelayedPrefixScheduler(GOLDEN, 7).plan(certain).budget == 5
    assert PrefixScheduler(GOLDEN, 7).plan(np.ones((9, 7))).budget == 0
