"""What would fewer drafts, or more users, do? Worked out from a package alone: numpy, no model, no engine.

    python examples/what-if/what_if.py builds/tiny/package
    python examples/what-if/what_if.py builds/smollm2-135m/package --domain code --requests 1 2 4 8

A step of R requests that verifies k drafts of each commits R * (1 + a_1 + ... + a_k) tokens, where a_j is the share of
drafts that survive up to position j (the certificate), and takes 1 / SPS(R, R + R k) seconds (the cost that schedules
the profile, scheduler.json). So: tokens/s = R * (1 + sum a_j) * SPS. The scheduler does the same sum per request and
step, with confidences in place of averages: its column is what it would choose if every draft were average.

Steps of all columns draft a whole block, k = 0 too. Plain decoding, which drafts nothing, stands in a column of its own
where the package has it measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dspark
from dspark.io.jsonfile import read_model
from dspark.profiling.cost import CostReport
from dspark.scheduling import StepCost

Floats = NDArray[np.float64]


def main() -> None:
    """Print a line for each number of requests."""
    arguments = read_arguments()
    package = dspark.load_package(arguments.package)
    entry = package.entry(arguments.profile or next(iter(sorted(package.scheduling.curves)), None))
    domain = chosen(entry.acceptance, arguments.domain)
    survival = np.array([share.value for share in entry.acceptance[domain].marginal])
    survival = np.pad(survival, (0, package.gamma - survival.size))  # no block got further: nothing survives there
    cost = package.scheduling.cost(entry.profile)
    plain = plain_speeds(package.folder / "scheduler" / "cost" / f"{entry.profile}.json")

    print(f"{package.manifest.name} on {entry.profile}, domain {domain}: predicted tokens/s of all requests")
    print("by drafts that are verified of each block; * is the best column\n")
    counts = range(package.gamma + 1)
    print(row(["requests", "plain", *(f"k={count}" for count in counts), "scheduler verifies"]))
    for requests in arguments.requests or loads(cost):
        speeds = [predicted(cost, survival, requests, count) for count in counts]
        shown = [plain.get(requests), *speeds]
        best = max(speed for speed in shown if speed is not None)
        cells = ["-" if speed is None else f"{speed:.1f}{'*' * (speed == best)}" for speed in shown]
        print(row([str(requests), *cells, average_plan(cost, survival, requests)]))


def predicted(cost: StepCost, survival: Floats, requests: int, count: int) -> float | None:
    """Tokens/s of `requests` requests that verify `count` drafts each; None: no step so large was measured.

    Args:
        survival: share of drafts that survive up to each position, [gamma].
    """
    tokens = requests * (1 + count)
    if tokens > cost.max_batch_tokens:
        return None
    return float(requests * (1 + survival[:count].sum()) * cost.rate(requests, tokens))


def average_plan(cost: StepCost, survival: Floats, requests: int) -> str:
    """What the scheduler would verify per request if all of them had average chances."""
    scheduler = dspark.PrefixScheduler(cost, survival.size)
    lengths = scheduler.lengths(np.tile(survival, (requests, 1)))
    return f"{lengths.mean():.1f}"


def plain_speeds(path: Path) -> dict[int, float]:
    """Tokens/s of plain decoding by number of requests, on average over the contexts that were measured."""
    seconds: dict[int, list[float]] = {}
    for measured in read_model(path, CostReport).plain if path.is_file() else ():
        seconds.setdefault(measured.requests, []).append(measured.step_seconds)
    return {requests: requests / float(np.mean(found)) for requests, found in seconds.items()}


def loads(cost: StepCost) -> list[int]:
    """1, 2, 4, ... as far as steps were measured."""
    return [2**power for power in range(cost.max_batch_tokens.bit_length()) if 2**power <= cost.max_batch_tokens]


def chosen(known: Iterable[str], name: str | None) -> str:
    """The domain that was asked for, else the first one."""
    names = sorted(known)
    if name is not None and name not in names:
        raise dspark.DsparkError(f"the certificate has no domain {name!r}", f"it has: {', '.join(names) or 'none'}")
    if not names:
        raise dspark.DsparkError("nothing was measured on this profile", "name another one with --profile")
    return name or names[0]


def row(cells: Sequence[str]) -> str:
    """One line of the table."""
    return "  ".join(cell.rjust(9) for cell in cells)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What gamma and load would do to tokens per second.")
    parser.add_argument("package", type=Path, help="a package's folder")
    parser.add_argument(
        "--profile", help="a serving profile of the certificate (default: the first that has step times)"
    )
    parser.add_argument("--domain", help="whose acceptance is taken (default: the first of the certificate)")
    parser.add_argument("--requests", type=int, nargs="+", help="concurrent requests (default: 1, 2, 4, ...)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except dspark.DsparkError as error:
        print(f"{error.message}\n  {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code or 1) from None
