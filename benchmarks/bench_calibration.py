"""Sequential temperature scaling on 1,000,000 blocks of 7: seconds, and held-out ECE beside a plain grid search.

    python benchmarks/bench_calibration.py [--rows 1000000] [--conversations 20000] [--grid 41]

The plain search is the paper's, as engines ship it: for each position in turn the temperature of a log-spaced grid with
the lowest ECE of the survival, fitted to all rows. Ours takes the split, the bootstrap over conversations, AUROC, Brier
and the reliability tables along. ECE is of 200,000 fresh blocks for both.
"""

import argparse
import sys
from time import perf_counter

import numpy as np

from dspark.calibration import Records, assess, ece, fit_temperatures
from dspark.scheduling import confidences

GAMMA = 7
SECONDS = 3.0  # the bar
WORSE = 1e-3  # of mean ECE, held to be noise


def blocks(rows: int, conversations: int, seed: int) -> Records:
    """A head that states log-odds 1.6 times too sharp, with noise of half a nat; conversations differ."""
    generator = np.random.default_rng(seed)
    owner = np.sort(generator.integers(0, conversations, rows))
    odds = generator.normal(np.linspace(1.6, 0.6, GAMMA), 1.2, (rows, GAMMA))
    odds += generator.normal(0, 0.4, conversations)[owner][:, None]
    accepted = np.logical_and.accumulate(generator.random((rows, GAMMA)) < confidences(odds), axis=1)
    return Records(1.6 * odds + generator.normal(0, 0.5, odds.shape), accepted, conversation=owner)


def plain(records: Records, grid: np.ndarray) -> list[float]:
    survival, found = np.ones(len(records)), []
    for k in range(records.gamma):
        tried = [ece(survival * confidences(records.z[:, k], value), records.survived[:, k]) for value in grid]
        found.append(float(grid[int(np.argmin(tried))]))
        survival = survival * confidences(records.z[:, k], found[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--grid", type=int, default=41, help="temperatures of the plain search, 0.1 .. 10")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    records, fresh = blocks(arguments.rows, arguments.conversations, 0), blocks(200_000, 4000, 1)
    seconds = []
    for _ in range(arguments.repeats):
        again = Records(records.logits, records.accepted, conversation=records.conversation)
        started = perf_counter()
        ours = fit_temperatures(again)
        seconds.append(perf_counter() - started)
    started = perf_counter()
    searched = plain(records, np.logspace(-1, 1, arguments.grid))
    plain_seconds = perf_counter() - started
    print(f"{arguments.rows} x {GAMMA} records of {arguments.conversations} conversations")
    print(f"ours   {np.median(seconds):6.2f} s (median of {len(seconds)}), method {ours.calibration.method}")
    print(f"plain  {plain_seconds:6.2f} s, {plain_seconds / np.median(seconds):.1f}x, {arguments.grid} temperatures")
    errors = {}
    for name, temperatures in (("T = 1", [1.0] * GAMMA), ("ours", ours.temperatures), ("plain", searched)):
        assessment = assess(fresh, temperatures)
        errors[name] = assessment.mean_ece_after.value
        low, high = assessment.mean_ece_after.ci95
        shown = " ".join(f"{value:.2f}" for value in temperatures)
        print(f"{name:6} mean ECE of fresh blocks {errors[name]:.4f} [{low:.4f}, {high:.4f}], T = {shown}")
    if np.median(seconds) > SECONDS or errors["ours"] > errors["plain"] + WORSE:
        sys.exit(f"below the bar: {SECONDS:g} s, mean ECE at most {WORSE:g} above the plain search's")


if __name__ == "__main__":
    main()
