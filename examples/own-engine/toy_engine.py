"""Schedule your own engine: the loop around `PrefixScheduler`, in an engine small enough to read. numpy alone.

    python examples/own-engine/toy_engine.py builds/tiny/package

The engine is a toy and says so: its target and its drafter are tables of next-token probabilities, and its clock is the
package's own cost of a step (scheduler.json) instead of a GPU. Everything else is what an engine has to do:

1. draft a block for every request, and keep the confidence logit of every position;
2. `scheduler.survival(logits)`: calibrated chances that each prefix is accepted, [requests, gamma];
3. `scheduler.plan(survival).lengths`: how many drafts of each request this step verifies, [requests];
4. verify exactly those, accept or reject token by token, commit one token more than was accepted.

Step 3 must not see the token that it decides about: the confidence of position j is worked out from the tokens before
j. That is what keeps the text the target's own, and the example counts that it is.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dspark

Floats = NDArray[np.float64]
Lengths = NDArray[np.intp]
VOCABULARY = 12


@dataclass(frozen=True)
class Tables:
    """Next-token probabilities given the last token, [V, V], and what the drafter's confidence head would say, [V]."""

    target: Floats
    drafter: Floats

    @classmethod
    def drawn(cls, seed: int) -> Tables:
        """A drafter that resembles its target, after some tokens more than after others."""
        generator = np.random.default_rng(seed)
        target = generator.dirichlet(np.full(VOCABULARY, 0.5), VOCABULARY)
        noise = generator.dirichlet(np.full(VOCABULARY, 0.5), VOCABULARY)
        share = generator.uniform(0.05, 0.7, (VOCABULARY, 1))
        return cls(target, (1 - share) * target + share * noise)

    @property
    def acceptance(self) -> Floats:
        """Chance that a draft after each token is accepted: sum over v of min(p(v), q(v)), [V]."""
        overlap: Floats = np.minimum(self.target, self.drafter).sum(axis=1)
        return overlap


@dataclass
class ToyEngine:
    """Requests that are decoded together, one step after the other.

    Attributes:
        tables: target and drafter.
        scheduler: of a package: cost of a step, block size, confidence temperatures.
        policy: `none`, `whole` or `scheduled`.
        seconds: on the engine's clock, so far.
        committed: tokens of all requests, so far.
    """

    tables: Tables
    scheduler: dspark.PrefixScheduler
    policy: str
    requests: int
    seed: int
    seconds: float = 0.0
    committed: int = 0
    followed: NDArray[np.int64] = field(init=False)  # how often each token followed each, [V, V]
    verified: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._last = self._random.integers(0, VOCABULARY, self.requests)
        self.followed = np.zeros((VOCABULARY, VOCABULARY), np.int64)

    def step(self) -> None:
        """Draft, schedule, verify, commit."""
        drafts, logits = self._draft()
        lengths = self._lengths(logits)
        for request, length in enumerate(lengths):
            self._commit(request, drafts[request, : int(length)])
        tokens = self.requests + int(lengths.sum())  # a bonus token each, and what is verified
        self.seconds += 1.0 / float(self.scheduler.cost.rate(self.requests, tokens))
        self.verified += int(lengths.sum())

    def _draft(self) -> tuple[NDArray[np.int64], Floats]:
        """Drafted tokens and confidence logits, [requests, gamma]; a logit is known before its own token is drawn."""
        gamma = self.scheduler.gamma
        drafts = np.zeros((self.requests, gamma), np.int64)
        chances = np.zeros((self.requests, gamma))
        before = self._last
        for position in range(gamma):
            chances[:, position] = self.tables.acceptance[before]
            before = np.array([self._draw(self.tables.drafter[token]) for token in before])
            drafts[:, position] = before
        # A head whose raw logits are off by exactly the temperatures that the package calibrated away.
        return drafts, self.scheduler.temperatures * np.log(chances / (1 - chances))

    def _lengths(self, logits: Floats) -> Lengths:
        """How many drafts of each request are verified, [requests]."""
        if self.policy == "scheduled":
            return self.scheduler.plan(self.scheduler.survival(logits)).lengths
        room = max(self.scheduler.cost.max_batch_tokens // self.requests - 1, 0)  # the engine's largest step
        whole = min(self.scheduler.gamma, room) if self.policy == "whole" else 0
        return np.full(self.requests, whole, np.intp)

    def _commit(self, request: int, drafts: NDArray[np.int64]) -> None:
        """Accept drafts as long as min(1, p / q) allows, then one token of the target's own."""
        last = int(self._last[request])
        for draft in drafts.tolist():
            wanted, proposed = self.tables.target[last], self.tables.drafter[last]
            if self._random.random() * proposed[draft] >= wanted[draft]:
                rest = np.maximum(wanted - proposed, 0)
                last = self._take(last, self._draw(rest / rest.sum()))
                break
            last = self._take(last, draft)
        else:
            last = self._take(last, self._draw(self.tables.target[last]))
        self._last[request] = last

    def _take(self, last: int, token: int) -> int:
        self.followed[last, token] += 1
        self.committed += 1
        return token

    def _draw(self, probabilities: Floats) -> int:
        return int(
            np.searchsorted(np.cumsum(probabilities), self._random.random(), side="right").clip(0, VOCABULARY - 1)
        )


def deviation(followed: NDArray[np.int64], target: Floats) -> float:
    """How far the text is from the target's own, in squares of what chance does: about 1 if it is the target's.

    Of n tokens behind the same one, a token of probability p comes n p times, give or take sqrt(n p (1 - p)).

    Args:
        followed: how often each token followed each, [V, V].
        target: how often it should, [V, V].
    """
    expected = followed.sum(axis=1, keepdims=True) * target
    counted = expected >= 5  # of rarer ones a single token more would be a large deviation
    squares = (followed - expected)[counted] ** 2 / expected[counted]
    return float(squares.sum() / (1 - target)[counted].sum())


def main() -> None:
    """Run the engine under every policy at several loads."""
    arguments = read_arguments()
    package = dspark.load_package(arguments.package)
    scheduler = package.scheduler(arguments.profile, temperature=arguments.temperature)
    tables = Tables.drawn(arguments.seed)
    print(f"toy tables, step times of {package.manifest.name}: tokens/s on the engine's own clock\n")
    print("requests     none    whole  scheduled  drafts verified per request and step")
    largest = scheduler.cost.max_batch_tokens
    for requests in [2**power for power in range(8) if 2**power <= largest]:
        speeds, per_step, off = {}, 0.0, 0.0
        for policy in ("none", "whole", "scheduled"):
            engine = ToyEngine(tables, scheduler, policy, requests, arguments.seed)
            for _ in range(arguments.steps):
                engine.step()
            speeds[policy] = engine.committed / engine.seconds
            if policy == "scheduled":
                per_step, off = engine.verified / arguments.steps / requests, deviation(engine.followed, tables.target)
        shown = f"{requests:8d} {speeds['none']:8.1f} {speeds['whole']:8.1f} {speeds['scheduled']:10.1f}"
        print(f"{shown}  {per_step:.2f} of {scheduler.gamma}; text against the target's: {off:.2f} (1 is equal)")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A toy engine that a package's scheduler drives.")
    parser.add_argument("package", type=Path, help="a package's folder")
    parser.add_argument("--profile", help="whose step times (default: the only one)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the calibration that is taken (default 1)")
    parser.add_argument("--steps", type=int, default=1000, help="of each run (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except dspark.DsparkError as error:
        print(f"{error.message}\n  {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
