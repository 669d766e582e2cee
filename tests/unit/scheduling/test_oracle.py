"""Both schedulers against brute force on 10,000 random steps: every allocation of every step is looked at.

Survival is a multiple of 1/16 and steps per second are whole numbers, so that sums and products are exact and what is
equal is equal to the last bit. A step probed at every batch size may cost anything, faster with more tokens included.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from algorithm1 import candidates

from dspark.scheduling import DelayedPrefixScheduler, PrefixScheduler

INSTANCES = 10_000


@dataclass(frozen=True)
class Probed:
    """A cost that was measured at every number of tokens up to the last one."""

    rates: np.ndarray

    @property
    def max_batch_tokens(self) -> int:
        return len(self.rates) - 1

    def rate(self, requests: int, tokens: np.ndarray) -> np.ndarray:
        return self.rates[tokens]


@dataclass(frozen=True)
class Step:
    survival: np.ndarray
    cost: Probed
    caps: np.ndarray
    least: int
    most: int


def random_step(generator: np.random.Generator) -> Step:
    requests, gamma = generator.integers(1, 4), generator.integers(1, 4)
    survival = -np.sort(-generator.integers(0, 17, (requests, gamma)), axis=1) / 16
    rates = generator.integers(1, 100, requests * (gamma + 1) + 1)
    kind = generator.integers(3)
    if kind == 0:  # what profiling hands over: never faster with more tokens
        rates = -np.sort(-rates)
    elif kind == 1:  # slow and with jags
        rates = 200 + np.cumsum(generator.choice([-9, -2, 0, 4], rates.size))
    most = int(generator.integers(1, rates.size))  # of the engine; it may be less than there are requests
    bounded = generator.random() < 0.5
    least = int(generator.integers(0, 4)) if bounded else 0
    return Step(
        survival,
        Probed(rates[: max(most, requests) + 1]),
        generator.integers(0, gamma + 2, requests) if bounded else np.full(requests, gamma),
        least,
        least + int(generator.integers(0, 5)) if bounded else 99,
    )


@cache
def allocations(requests: int, gamma: int) -> np.ndarray:
    return np.array(list(itertools.product(range(gamma + 1), repeat=requests)))


def best_by_budget(step: Step, caps: np.ndarray) -> np.ndarray:
    """The highest tokens per second of every budget, [1 + largest]: over all allocations that it allows."""
    requests, gamma = step.survival.shape
    every = allocations(requests, gamma)
    every = every[(every <= caps).all(axis=1)]
    gained = np.concatenate([np.zeros((requests, 1)), np.cumsum(step.survival, axis=1)], axis=1)
    budgets = every.sum(axis=1)
    tau = np.zeros(budgets.max() + 1)
    np.maximum.at(tau, budgets, requests + gained[np.arange(requests), every].sum(axis=1))
    most = min(budgets.max(), step.most, step.cost.max_batch_tokens - requests)
    return tau[: most + 1] * step.cost.rates[requests : requests + most + 1]


def throughput(step: Step, lengths: np.ndarray) -> float:
    requests = len(step.survival)
    tau = requests + sum(row[:length].sum() for row, length in zip(step.survival, lengths, strict=True))
    return float(tau * step.cost.rates[requests + lengths.sum()])


def first_lengths(step: Step, budget: int) -> list[int]:
    """Of equal survival the earlier position comes first, then the earlier request."""
    lengths = [0] * len(step.survival)
    for request, _, _ in candidates(step.survival.tolist(), step.caps)[:budget]:
        lengths[request] += 1
    return lengths


def test_early_stop_is_the_best_allocation_of_each_budget_until_one_more_does_not_pay():
    generator = np.random.default_rng(0)
    budgets, rises = set(), 0
    for _ in range(INSTANCES):
        step = random_step(generator)
        best = best_by_budget(step, step.caps)
        expected = min(step.least, len(best) - 1)
        while expected + 1 < len(best) and best[expected + 1] > best[expected]:
            expected += 1
        scheduler = PrefixScheduler(step.cost, step.survival.shape[1], min_budget=step.least, max_budget=step.most)
        plan = scheduler.plan(step.survival, step.caps)
        assert plan.lengths.tolist() == first_lengths(step, expected)
        assert plan.tokens_per_second == throughput(step, plan.lengths) == best[expected]
        assert plan.tokens_per_second_without == best[0]
        budgets.add(expected)
        rises += bool((np.diff(step.cost.rates) > 0).any())
    assert budgets >= set(range(8)) and rises > INSTANCES / 3, "the steps are too alike"


def test_the_capacity_is_the_smallest_of_the_best_budgets_whatever_the_curve():
    generator = np.random.default_rng(1)
    crossed = 0
    for _ in range(INSTANCES):
        step = random_step(generator)
        gamma = step.survival.shape[1]
        best = best_by_budget(step, np.full(len(step.survival), gamma))  # of an earlier step, which knew of no caps
        lower = min(step.least, len(best) - 1)
        expected = lower + int(np.argmax(best[lower:]))
        scheduler = DelayedPrefixScheduler(step.cost, gamma, lag=1, min_budget=step.least, max_budget=step.most)
        assert scheduler.capacity(step.survival) == expected
        scheduler.step(step.survival)
        plan = scheduler.step(step.survival, caps=step.caps)
        assert plan.lengths.tolist() == first_lengths(step, expected)
        assert plan.tokens_per_second == throughput(step, plan.lengths)
        crossed += bool((np.diff(best[lower : expected + 1]) <= 0).any())
    assert crossed > INSTANCES / 40, "hardly a capacity lies behind a jag"


@pytest.mark.parametrize("requests", [64, 256])
def test_large_steps_are_the_literal_walk_too(requests: int):
    """R = 256 and gamma = 7 against the walk over sorted pairs, with many ties."""
    generator = np.random.default_rng(requests)
    survival = np.cumprod(generator.choice([0.5, 1.0], (requests, 7)), axis=1)
    cost = Probed(np.arange(4000, 4000 - requests * 8 - 1, -1))
    plan = PrefixScheduler(cost, 7).plan(survival)
    lengths, tau, best = [0] * requests, float(requests), float(requests * cost.rates[requests])
    for count, (request, _, value) in enumerate(candidates(survival.tolist()), start=1):
        tau += value
        if not tau * cost.rates[requests + count] > best:
            break
        best = float(tau * cost.rates[requests + count])
        lengths[request] += 1
    assert plan.lengths.tolist() == lengths and 0 < plan.budget < requests * 7
