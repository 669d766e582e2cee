from collections import Counter

import numpy as np
import pytest

from dspark.errors import DataError
from dspark.training.batches import SORTED_BATCHES
from dspark.training.mixture import plan_mixture

DOMAINS = ["math"] * 50 + ["code"] * 30 + ["sql"] * 40
LENGTHS = np.random.default_rng(0).integers(5, 90, len(DOMAINS))


def steps_of(mixture, windows, seed=0):
    return [step for number in range(windows) for step in mixture.window(LENGTHS, seed, number)]


@pytest.mark.parametrize("replay", [0.0, 0.1, 0.25, 0.5, 0.8, 0.99])
def test_the_share_holds_over_a_window_and_within_one_sequence_of_every_step(replay):
    mixture = plan_mixture(DOMAINS, ["sql"], replay, 4)
    steps = steps_of(mixture, 30)
    assert {len(step) for step in steps} == {4}
    replayed = [sum(DOMAINS[index] != "sql" for index in step) for step in steps]
    # A window is a whole number of sequences, so its share is within half a sequence, but for the one that is least.
    whole = mixture.steps * 4
    expected = min(max(replay * whole, 1), whole - 1) if replay else 0
    assert abs(sum(replayed) / 30 - expected) <= 0.5
    assert max(replayed) - min(replayed) <= 1


def test_the_replayed_part_is_the_old_mixture_as_it_was():
    """Every old sequence as often as any other: 50 of math and 30 of code give 5 to 3, not 1 to 1."""
    steps = steps_of(plan_mixture(DOMAINS, ["sql"], 0.5, 4), 400)
    seen = Counter(int(index) for step in steps for index in step)
    old = [seen[index] for index in range(80)]
    assert max(old) - min(old) < 0.35 * np.mean(old)
    domains = Counter(DOMAINS[index] for index in seen.elements())
    assert domains["math"] / domains["code"] == pytest.approx(5 / 3, rel=0.05)


def test_within_a_window_no_sequence_comes_twice_and_an_epoch_sees_all_it_has_room_for():
    mixture = plan_mixture(DOMAINS, ["sql"], 0.5, 4)
    assert (mixture.counts, mixture.steps) == ((16, 16), SORTED_BATCHES)
    for number in range(20):
        window = np.concatenate(mixture.window(LENGTHS, 0, number))
        assert len(set(window.tolist())) == len(window)
    first_epoch = np.concatenate(steps_of(mixture, 40 // 16))
    assert len({index for index in first_epoch if DOMAINS[index] == "sql"}) == 32  # 40, less the tail of 8


def test_windows_are_functions_of_seed_and_number():
    mixture = plan_mixture(DOMAINS, ["sql"], 0.5, 4)
    again = plan_mixture(DOMAINS, ["sql"], 0.5, 4)
    for number in (7, 0, 7):
        for one, two in zip(mixture.window(LENGTHS, 3, number), again.window(LENGTHS, 3, number), strict=True):
            assert np.array_equal(one, two)
    assert not np.array_equal(mixture.window(LENGTHS, 3, 0)[0], mixture.window(LENGTHS, 4, 0)[0])


def test_a_small_domain_gets_shorter_windows():
    """Nine new sequences, four a step: two steps take eight, three would need a sequence twice."""
    domains = ["math"] * 50 + ["sql"] * 9
    assert plan_mixture(domains, ["sql"], 0.5, 8).steps == 2
    assert plan_mixture(domains, ["sql"], 0.5, 2).steps == SORTED_BATCHES


@pytest.mark.parametrize(
    ("old", "new", "replay", "message"),
    [
        (50, 3, 0.5, r"takes 4 replayed and 4 new sequences, the train split has 50 and 3 \(sql\)"),
        (3, 50, 0.5, "has 3 and 50"),
        (50, 0, 0.5, "has 50 and 0"),
        (50, 7, 0.0, "takes 0 replayed and 8 new sequences, the train split has 50 and 7"),
    ],
)
def test_too_few_sequences_are_refused_with_the_counts(old, new, replay, message):
    with pytest.raises(DataError, match=message):
        plan_mixture(["math"] * old + ["sql"] * new, ["sql"], replay, 8)
