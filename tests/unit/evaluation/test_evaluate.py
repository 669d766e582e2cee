"""`evaluate`: figures of a drafter on prompts, from the loop itself."""

from __future__ import annotations

import pytest

from dspark.decoding.loop import decode
from dspark.decoding.proposers import torch_proposer
from dspark.errors import DataError
from dspark.evaluation.decoding import evaluate
from dspark.evaluation.tiny import tiny_drafter, tiny_target

PROMPTS = [[2, 3, 4], [5, 6], [7, 8, 9, 10], [11]]


def test_tau_is_what_counting_the_loops_tokens_gives() -> None:
    """Committed tokens over passes of the target, counted from the records of the same decoding."""
    target = tiny_target(24, eos_token_ids=(1,))
    proposer = torch_proposer(tiny_drafter(target, 3))
    found = evaluate(target, proposer, PROMPTS, max_new_tokens=20)
    decoded = decode(target, proposer, PROMPTS, max_new_tokens=20)
    committed = sum(int(one.cycles.committed.sum()) for one in decoded)
    assert found.tau.value == pytest.approx(committed / sum(len(one.cycles) for one in decoded))
    assert found.tau.n == len(PROMPTS) and found.includes_bonus is True
    assert 1 <= found.tau.value <= 4
    first = [cycles.accepted[row] > 0 for one in decoded for cycles in [one.cycles] for row in range(len(cycles))]
    assert found.conditional[0].value == pytest.approx(sum(first) / len(first), abs=0.2)


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    target = tiny_target(24)
    proposer = torch_proposer(tiny_drafter(target, 3))
    figures = [
        evaluate(target, proposer, PROMPTS, max_new_tokens=30, temperature=1.0, seed=seed).model_dump()
        for seed in (0, 0, 1)
    ]
    assert figures[0] == figures[1] != figures[2]


def test_nothing_to_measure_is_an_error_that_says_so() -> None:
    target = tiny_target(24)
    proposer = torch_proposer(tiny_drafter(target, 3))
    with pytest.raises(DataError, match="no prompts"):
        evaluate(target, proposer, [])
    with pytest.raises(DataError, match="ended with its first token"):
        evaluate(target, proposer, PROMPTS, max_new_tokens=1)
