from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.decoding.draws import CounterDraws


def rows(*requests: int) -> np.ndarray:
    return np.array(requests, np.intp)


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_draw_depends_on_the_seed_and_the_draw_number_only():
    """The stream of seed 7 is the same alone, in a batch, in another row, and in differently sized portions."""
    alone = CounterDraws([7]).uniform(rows(0), counts(6))[0]
    batch = CounterDraws([3, 7])
    first = batch.uniform(rows(0, 1), counts(4, 2))[1, :2]
    second = batch.uniform(rows(1), counts(3))[0]
    third = batch.uniform(rows(1, 0), counts(1, 1))[0]
    assert np.concatenate([first, second, third]).tolist() == alone.tolist()


def test_no_number_is_handed_out_twice():
    draws = CounterDraws([0, 1, 2, 3])
    taken = [draws.uniform(rows(0, 1, 2, 3), counts(*sizes)) for sizes in ((3, 1, 0, 2), (1, 1, 1, 1), (2, 0, 5, 1))]
    used = [row[:n] for block, sizes in zip(taken, ((3, 1, 0, 2), (1, 1, 1, 1), (2, 0, 5, 1)), strict=True)
            for row, n in zip(block, sizes, strict=True)]  # fmt: skip
    numbers = np.concatenate(used)
    assert len(set(numbers.tolist())) == len(numbers) == 18


def test_positions_under_verification_use_up_their_numbers_whether_accepted_or_not():
    """A rejection at the first of three positions still moves on by three: its numbers are gone for good."""
    draws, reference = CounterDraws([5]), CounterDraws([5])
    assert draws.accept(torch.zeros(1, 3), counts(3), rows(0)).tolist() == [0]
    stream = reference.uniform(rows(0), counts(4))[0]
    assert draws.uniform(rows(0), counts(1))[0, 0] == stream[3]


def test_numbers_are_uniform():
    """Chi-square over 64 cells, 63 degrees of freedom: 99.9 % of uniform streams stay below 103."""
    numbers = CounterDraws([11]).uniform(rows(0), counts(64_000))[0]
    assert numbers.min() >= 0 and numbers.max() < 1
    cells = np.bincount((numbers * 64).astype(int), minlength=64)
    assert ((cells - 1000) ** 2 / 1000).sum() < 103


def test_streams_of_neighbouring_seeds_are_unrelated():
    """Correlation of 20 000 pairs has standard deviation 0.007."""
    block = CounterDraws([0, 1]).uniform(rows(0, 1), counts(20_000, 20_000))
    assert abs(np.corrcoef(block)[0, 1]) < 0.03
    assert not set(block[0].tolist()) & set(block[1].tolist())


def test_negative_and_huge_seeds_are_seeds():
    assert CounterDraws([-1]).uniform(rows(0), counts(1)) == CounterDraws([2**64 - 1]).uniform(rows(0), counts(1))


def test_categorical_follows_its_probabilities_and_never_draws_an_impossible_outcome():
    """40 000 draws from (0, .7, 0, .3, 0): frequency .7 has standard deviation 0.0023."""
    probs = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0]).expand(40_000, 5)
    drawn = CounterDraws(range(40_000)).categorical(probs, np.arange(40_000))
    assert drawn.dtype == torch.int64
    assert set(drawn.tolist()) == {1, 3}
    assert abs((drawn == 1).double().mean().item() - 0.7) < 0.01


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_categorical_takes_weights_of_any_total(scale: float):
    """A sum in float32 is never exactly one; the draw is relative to what the row sums to."""
    probs = torch.tensor([[0.25, 0.75]]) * scale
    same = [CounterDraws([seed]).categorical(probs, rows(0)).item() for seed in range(200)]
    unit = [CounterDraws([seed]).categorical(probs / scale, rows(0)).item() for seed in range(200)]
    assert same == unit
    assert set(same) == {0, 1}


def test_acceptance_stops_at_the_first_rejection_and_at_the_length():
    probs = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    accepted = CounterDraws(range(4)).accept(probs, counts(3, 3, 2, 3), np.arange(4))
    assert accepted.tolist() == [1, 3, 2, 0]


def test_acceptance_happens_with_its_probability():
    """P(prefix of 2) = .6 * .5; 20 000 draws have standard deviation 0.0032."""
    probs = torch.tensor([0.6, 0.5]).expand(20_000, 2)
    accepted = CounterDraws(range(20_000)).accept(probs, np.full(20_000, 2), np.arange(20_000))
    assert abs((accepted >= 1).mean() - 0.6) < 0.014
    assert abs((accepted == 2).mean() - 0.3) < 0.014
