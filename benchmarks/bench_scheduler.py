"""How long a scheduler takes to decide, on one core, and how much longer Algorithm 1 takes as it is written down.

    python benchmarks/bench_scheduler.py [--repeats 2000]

The plain way sorts pairs of requests and positions and walks them one by one. Survival, budgets and the curve are such
that the walk stops about half-way. The delayed scheduler plans every step from the confidences of two steps ago.
"""

import argparse
import sys
from time import perf_counter

import numpy as np
from pairs import ratio, report

from dspark.scheduling import CostCurve, DelayedPrefixScheduler, PrefixScheduler

GAMMA = 7
BARS = {64: 60e-6, 256: 200e-6}  # seconds of a decision
PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)


def curve() -> CostCurve:
    """A step of 20 ms and what its tokens take beside it."""
    rates = tuple(1 / (0.02 + 4e-5 * tokens) for tokens in PROBES)
    return CostCurve(
        sample_batch_tokens=PROBES, sample_steps_per_second=rates, max_batch_tokens=PROBES[-1], lookup="linear"
    )


def plain(survival: np.ndarray, cost: CostCurve) -> list[int]:
    requests = len(survival)
    rates = cost.steps_per_second(np.arange(requests * (GAMMA + 1) + 1)).tolist()
    pairs = sorted((-value, j, r) for r, row in enumerate(survival.tolist()) for j, value in enumerate(row))
    lengths, tau, best = [0] * requests, float(requests), requests * rates[requests]
    for count, (negative, _, r) in enumerate(pairs, start=1):
        tau -= negative
        theta = tau * rates[requests + count]
        if theta <= best:
            break
        best = theta
        lengths[r] += 1
    return lengths


def microseconds(work, repeats: int) -> tuple[float, float]:
    """The median decision and the slowest of a hundred."""
    seconds = []
    for _ in range(repeats):
        started = perf_counter()
        work()
        seconds.append(perf_counter() - started)
    return float(np.median(seconds)) * 1e6, float(np.quantile(seconds, 0.99)) * 1e6


def measure(requests: int, bar: float, repeats: int) -> list[str]:
    """Prints a step of so many requests; returns what is over the bar."""
    generator = np.random.default_rng(requests)
    steps = [np.cumprod(generator.beta(4, 1, (requests, GAMMA)), axis=1) for _ in range(16)]
    early, delayed = PrefixScheduler(curve(), GAMMA), DelayedPrefixScheduler(curve(), GAMMA)
    if any(early.lengths(survival).tolist() != plain(survival, early.cost) for survival in steps):
        sys.exit("the two ways differ")
    verified = np.mean([early.plan(survival).budget for survival in steps])
    print(f"R = {requests}, gamma = {GAMMA}: {verified:.0f} of {requests * GAMMA} drafts are verified")
    turn = iter(range(10**9))
    names = [f"request {number}" for number in range(requests)]
    decisions = {
        "early stop": lambda: early.plan(steps[next(turn) % 16]),
        "delayed": lambda: delayed.step(steps[next(turn) % 16], names),
    }
    late = []
    for name, decide in decisions.items():
        median, slow = microseconds(decide, repeats)
        print(f"  {name:12} {median:6.1f} us, 99 of 100 within {slow:.1f} us (at most {bar * 1e6:.0f})")
        if median > bar * 1e6:
            late.append(f"{name} at R = {requests}")
    measured = ratio(decisions["early stop"], lambda: plain(steps[next(turn) % 16], early.cost), seconds=0.05)
    report("  early stop against a walk over sorted pairs", measured)
    return late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    late = [name for requests, bar in BARS.items() for name in measure(requests, bar, repeats)]
    if late:
        sys.exit(f"over the bar: {', '.join(late)}")


if __name__ == "__main__":
    main()
