from __future__ import annotations

import numpy as np
import pytest
from algorithm1 import candidates, retrospective, sps

from dspark.errors import DataError, SettingsError
from dspark.scheduling import CostCurve, DelayedPrefixScheduler, PrefixScheduler

GOLDEN = CostCurve(sample_batch_tokens=[2, 4, 6, 8], sample_steps_per_second=[100, 95, 80, 60], max_batch_tokens=8)
SURVIVAL = np.array([[0.9, 0.72, 0.36], [0.6, 0.3, 0.12]])


def test_golden_vector_of_sglang_is_met():
    """engine-formats.md 1.3: budget 3, predicted theta 400.9, verify lengths [3, 2] with the anchor counted."""
    scheduler = DelayedPrefixScheduler(GOLDEN, 3)
    assert scheduler.capacity(SURVIVAL) == 3
    for _ in range(3):  # from the third step on, the capacity rests on these same survivals
        plan = scheduler.step(SURVIVAL)
    assert (plan.lengths + 1).tolist() == [3, 2]
    assert plan.tokens_per_second == pytest.approx(400.9)
    assert plan.tokens_per_second_without == pytest.approx(200)


def test_capacity_is_the_best_point_of_the_whole_curve():
    generator = np.random.default_rng(0)
    for _ in range(400):
        requests, gamma = generator.integers(1, 5), generator.integers(1, 5)
        survival = np.cumprod(generator.random((requests, gamma)), axis=1)
        rates = (100 * np.cumprod(generator.choice([1, 0.99, 0.8, 0.6], 24))).tolist()
        rates[-1] *= 0.9
        curve = CostCurve(sample_batch_tokens=range(1, 25), sample_steps_per_second=rates, max_batch_tokens=24)
        expected = sum(retrospective(survival.tolist(), list(range(1, 25)), rates))
        assert DelayedPrefixScheduler(curve, int(gamma)).capacity(survival) == expected


def test_capacity_crosses_a_jag_where_early_stop_does_not(cost_case):
    """At .99 survival 31.7 tokens at 79 steps/s beat 15.9 at 99; both as the paper says."""
    curve, survival = cost_case("jagged-but-real"), np.full((2, 15), 0.99)
    assert PrefixScheduler(curve, 15).lengths(survival).sum() == 14
    assert DelayedPrefixScheduler(curve, 15).capacity(survival) == 30


def test_capacity_of_a_step_comes_from_two_steps_before():
    """The first two steps know nothing (survival 1); then each step has the budget of the survivals two steps ago."""
    scheduler = DelayedPrefixScheduler(GOLDEN, 3)
    sharp, hopeless = np.full((2, 3), 0.99), np.full((2, 3), 0.01)
    blocks = (hopeless, sharp, sharp, sharp, hopeless, hopeless, sharp, sharp)
    budgets = [scheduler.step(block).budget for block in blocks]
    full, none = scheduler.capacity(sharp), scheduler.capacity(hopeless)
    assert full == scheduler.capacity(np.ones((2, 3)))  # as for requests never seen
    assert none < full
    assert budgets == [full, full, none, full, full, full, none, none]


def test_tokens_are_chosen_by_todays_survival():
    scheduler = DelayedPrefixScheduler(GOLDEN, 3)
    for _ in range(2):
        scheduler.step(SURVIVAL)
    assert scheduler.step(SURVIVAL[::-1]).lengths.tolist() == [1, 2]


def test_requests_are_found_by_their_id_and_new_ones_count_as_certain():
    scheduler = DelayedPrefixScheduler(GOLDEN, 3)
    scheduler.step(np.array([[0.01, 0.01, 0.01], [0.9, 0.9, 0.9]]), requests=["a", "b"])
    scheduler.step(np.full((1, 3), 0.5), requests=["b"])
    known = scheduler.capacity(np.array([[0.9, 0.9, 0.9], [1, 1, 1]]))
    assert scheduler.step(np.full((2, 3), 0.5), requests=["b", "c"]).budget == known


def test_no_confidence_of_the_block_decides_its_own_capacity():
    """Any later confidence may change; the admission of token k of its request may not."""
    generator = np.random.default_rng(1)
    for _ in range(150):
        history = [np.cumprod(generator.random((3, 4)), axis=1) for _ in range(3)]

        def lengths(last, history=history):
            scheduler = DelayedPrefixScheduler(GOLDEN, 4)
            for block in history[:-1]:
                scheduler.step(block)
            return scheduler.lengths(last)

        before = lengths(history[-1])
        r, k = int(generator.integers(3)), int(generator.integers(3))
        changed = history[-1].copy()
        changed[r, k + 1 :] = changed[r, k] * generator.choice([0.0, 1.0])
        assert (lengths(changed)[r] > k) == (before[r] > k)


def test_budgets_gain_and_caps_bound_the_capacity():
    ones = np.ones((2, 3))
    assert DelayedPrefixScheduler(GOLDEN, 3, max_budget=2).step(ones).budget == 2
    assert DelayedPrefixScheduler(GOLDEN, 3, min_budget=5).capacity(np.zeros((2, 3))) == 5
    assert DelayedPrefixScheduler(GOLDEN, 3).step(ones, caps=[1, 0]).lengths.tolist() == [1, 0]


def test_min_predicted_gain_asks_the_same_of_each_token_as_early_stop():
    """argmax of theta(b) / (1 + g/R)^b, by hand over all budgets."""
    order = candidates(SURVIVAL.tolist())
    for gain in (0.0, 0.2, 0.5):
        scores = [
            (2 + sum(a for _, _, a in order[:b]))
            * sps(GOLDEN.sample_batch_tokens, GOLDEN.sample_steps_per_second, 2 + b)
            / (1 + gain / 2) ** b
            for b in range(7)
        ]
        assert DelayedPrefixScheduler(GOLDEN, 3, min_predicted_gain=gain).capacity(SURVIVAL) == int(np.argmax(scores))


def test_a_step_without_requests_is_empty_and_remembered():
    scheduler = DelayedPrefixScheduler(GOLDEN, 3)
    assert scheduler.step(np.zeros((0, 3))).budget == 0
    assert scheduler.step(SURVIVAL).budget > 0


def test_same_step_confidences_and_wrong_ids_are_refused():
    with pytest.raises(SettingsError, match="lag must be at least 1"):
        DelayedPrefixScheduler(GOLDEN, 3, lag=0)
    for ids in (["a"], ["a", "a"]):
        with pytest.raises(DataError, match="2 rows of survival"):
            DelayedPrefixScheduler(GOLDEN, 3).step(SURVIVAL, requests=ids)
    with pytest.raises(DataError, match="shape"):
        DelayedPrefixScheduler(GOLDEN, 3).step(np.ones((2, 4)))
