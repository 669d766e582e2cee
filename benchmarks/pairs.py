"""Two ways of doing the same thing, timed in turn in one process: what counts is the ratio, not the seconds."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from dspark.measured import Measured, bootstrap

Work = Callable[[], object]


def ratio(ours: Work, other: Work, *, pairs: int = 15, seconds: float = 0.1) -> Measured:
    """How many times as long the other way takes.

    The order alternates, so that a machine which slows down slows both; a side repeats its work for about `seconds`.

    Returns:
        the median over pairs of the ratio, with its bootstrap interval.
    """
    repeats = {work: max(1, round(seconds / _once(work))) for work in (ours, other)}
    ratios = []
    for number in range(pairs):
        times = {}
        for work in (ours, other) if number % 2 == 0 else (other, ours):
            started = perf_counter()
            for _ in range(repeats[work]):
                work()
            times[work] = (perf_counter() - started) / repeats[work]
        ratios.append(times[other] / times[ours])
    measured = bootstrap(pairs, lambda chosen: float(np.median(np.array(ratios)[chosen])))
    if measured is None:
        raise RuntimeError("no pair was timed")
    return measured


def report(name: str, measured: Measured) -> None:
    """One line per comparison."""
    print(f"{name:64} {measured.value:6.2f}x  [{measured.ci95[0]:.2f}, {measured.ci95[1]:.2f}]  {measured.n} pairs")


def _once(work: Work) -> float:
    work()
    started = perf_counter()
    work()
    return perf_counter() - started
