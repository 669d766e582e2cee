"""Rounds in turn: which order a group of prompts sees, which rounds judge, and how often chance looks like a gain."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # load_rounds.py

from load_rounds import comparison, round_of

from dspark.decoding.policies import Fixed, NoDrafts
from dspark.evaluation import rounds
from dspark.evaluation.rounds import ENOUGH, NONE, Arm, Comparison, Round, run_in_turn
from dspark.io.progress import Progress
from dspark.measured import bootstrap


def asked(count: int, groups: int) -> list[tuple[int, str]]:
    """The group of each round and the arm that went first."""
    arms = [Arm(NONE, None, NoDrafts()), Arm("fixed", None, Fixed())]
    calls: list[tuple[int, str]] = []

    def run(arm: Arm, group: int, tokens: int) -> Round:
        calls.append((group, arm.name))
        return round_of(group, 1, 1.0, 1.0)

    run_in_turn(arms, run, prompts=groups, concurrency=1, rounds=count, max_new_tokens=4, progress=Progress())
    return calls[len(arms) :: len(arms)]  # behind the warm-up


def equal_rounds(count: int, groups: int) -> Comparison:
    return comparison(1, {"none": [(1, 1)] * count, "fixed": [(1, 1)] * count}, groups)


@pytest.mark.parametrize("groups", range(1, 9))
def test_every_group_is_asked_in_both_orders_and_so_is_every_pair_of_rounds(groups: int):
    """Two passes over the groups ask each once forwards and once backwards."""
    found = asked(2 * groups, groups)
    assert Counter(found) == Counter((group, arm) for group in range(groups) for arm in (NONE, "fixed"))
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first[1] != second[1]


@pytest.mark.parametrize("groups", range(1, 9))
@pytest.mark.parametrize("count", range(4, 13))
def test_halves_are_as_many_rounds_in_both_orders(count: int, groups: int):
    orders = [arm for _, arm in asked(count, groups)]
    choose, judge = equal_rounds(count, groups).halves()
    assert len(choose) == len(judge) == count // 4 * 2
    assert sorted([*choose, *judge]) == list(range(count // 4 * 4))
    for half in (choose, judge):
        assert Counter(orders[number] for number in half) == {NONE: len(half) // 2, "fixed": len(half) // 2}


@pytest.mark.parametrize(
    ("count", "groups", "each"),
    [(4, 1, [2]), (8, 2, [2, 2]), (12, 3, [2, 2, 2]), (8, 4, [1, 1, 1, 1]), (16, 8, [1] * 8), (12, 6, [1] * 6)],
)
def test_halves_see_the_same_groups(count: int, groups: int, each: list[int]):
    """The second half of eight rounds of four groups used to be groups 2 and 3, twice."""
    for half in equal_rounds(count, groups).halves():
        assert sorted(Counter(number % groups for number in half).items()) == list(enumerate(each))


def test_fewer_than_four_rounds_make_no_halves():
    assert equal_rounds(3, 2).halves() == ([], [])
    assert equal_rounds(ENOUGH - 1, 2).judged("fixed") is None


@pytest.mark.parametrize(
    ("count", "groups", "units"), [(12, 1, 12), (12, 2, 12), (14, 7, 14), (16, 8, 8), (10, 10, 10)]
)
def test_few_groups_of_prompts_are_no_units(count: int, groups: int, units: int):
    assert equal_rounds(count, groups).ratio("fixed").n == units


def test_chance_is_taken_for_a_gain_once_in_forty_times(monkeypatch: pytest.MonkeyPatch):
    """Both arms are as fast; each round is off by a twentieth, in 400 worlds of two groups of prompts and six rounds
    that judge. 10 are expected, 27 with the percentiles of six rounds, 100 with those of two groups."""
    monkeypatch.setattr(rounds, "bootstrap", partial(bootstrap, resamples=300))
    generator = np.random.default_rng(0)
    gains = 0
    for _ in range(400):
        speeds = np.exp(0.05 * generator.standard_normal((2, 12)))
        world = {name: [(1, speed) for speed in found] for name, found in zip(("none", "fixed"), speeds, strict=True)}
        found = comparison(1, world, groups=2).judged("fixed")
        assert found is not None and found.n == 6
        gains += found.ci95[0] > 1
    assert gains <= 20


def test_a_gain_of_six_rounds_is_seen():
    """Half as fast again, off by a twentieth in each round: the error of six is 1.5 * .05 * sqrt(2 / 6) = .043, and
    Student's t 2.57, so that the lower bound is about 1.39."""
    speeds = np.exp(0.05 * np.random.default_rng(1).standard_normal((2, 12)))
    world = {"none": [(1, speed) for speed in speeds[0]], "fixed": [(1, 1.5 * speed) for speed in speeds[1]]}
    found = comparison(1, world, groups=2).judged("fixed")
    assert found is not None and found.value == pytest.approx(1.5, abs=0.1)
    assert 1.2 < found.ci95[0] < found.value < found.ci95[1] < 1.8
