"""When tau in an engine and tau offline agree, and what equal counters say beside it."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.evaluation.agreement import compare_taus
from dspark.evaluation.counters import judge_counters
from dspark.evaluation.entry import Agreement
from dspark.measured import Measured

STEPS = np.full(40, 100.0)


def compared(engine: np.ndarray) -> str:
    return compare_taus((STEPS * 2, STEPS), (engine, STEPS), tolerance=0.02).result


def test_the_tolerance_is_what_a_difference_is_measured_by_not_zero() -> None:
    """+2.6 % on average with prompts from +0.6 to +4.6 %: certainly not zero, and perhaps within 2 %."""
    assert compared(STEPS * 2 * 1.019) == "agrees"
    assert compared(STEPS * 2 * np.where(np.arange(40) % 2, 0.9, 1.152)) == "inconclusive"
    assert compared(STEPS * 2 * 1.03) == compared(STEPS * 2 * 0.97) == "disagrees"
    few = (np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    found = compare_taus(few, (np.array([2.0, 2.1]), few[1]), tolerance=0.02)
    assert found.relative_difference.value == pytest.approx(0.025) and found.relative_difference.ci95[0] >= 0
    assert found.result == "inconclusive"


def agreement(result: str, equal: int | None, prompts: int) -> Agreement:
    tau = Measured(value=1.5, n=prompts, ci95=(1.4, 1.6))
    return Agreement(
        result=result, tolerance=0.02, prompts=prompts, offline_tau=tau, engine_tau=tau,
        relative_difference=tau, equal_counters=equal,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "equal", "prompts", "verdict", "reason"),
    [
        ("agrees", 6, 8, "agrees", None),
        ("agrees", 1, 8, "disagrees", "the engine drafts something else"),
        ("agrees", None, 8, "agrees", None),  # an engine that counts nothing of single prompts
        ("inconclusive", 5, 8, "inconclusive", "on 8 prompts, which are too few"),
        ("inconclusive", 0, 8, "disagrees", "only 0 of 8 prompts"),
        ("inconclusive", 0, 2, "inconclusive", "on 2 prompts, which are too few"),
        ("disagrees", 5, 8, "disagrees", "more than 2% apart"),
    ],
)
def test_counters_tell_what_tau_leaves_open(
    result: str, equal: int | None, prompts: int, verdict: str, reason: str | None
) -> None:
    found, why = judge_counters(agreement(result, equal, prompts))
    assert found == verdict and (why is None if reason is None else reason in str(why))
