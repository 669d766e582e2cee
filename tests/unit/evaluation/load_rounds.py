"""Rounds whose figures are as a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dspark.decoding.policies import parse_policy
from dspark.evaluation.rounds import Arm, Comparison, Request, Round
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.prefix import PrefixScheduler

SCHEDULER = PrefixScheduler(
    CostCurve(sample_batch_tokens=(1, 8), sample_steps_per_second=(1.0, 0.5), max_batch_tokens=8), 2
)


def round_of(group: int, concurrency: int, speed: float, throughput: float, verified: int = 1) -> Round:
    """Answers of 11 tokens in ten cycles: `speed` of one user, `throughput` of all; half of the time is prefill."""
    seconds = 11 * concurrency / throughput
    one = Request((5,) * 11, seconds / 2, np.full(10, 1 / speed), np.ones(10, np.int32))
    return Round(group, seconds, (one,) * concurrency, 10 * concurrency, 10 * concurrency * verified, 0.1, 0.2)


def comparison(concurrency: int, speeds: Mapping[str, Sequence[tuple[float, float]]], groups: int = 4) -> Comparison:
    """Of each arm, by its policy's name, (speed of one user, throughput of all) in each round; groups take turns."""
    arms = tuple(Arm(name, None, parse_policy(name, scheduler=SCHEDULER)) for name in speeds)
    rounds = {
        name: [
            round_of(number % groups, concurrency, *figures, verified=int(name != "none"))
            for number, figures in enumerate(found)
        ]
        for name, found in speeds.items()
    }
    return Comparison(arms, rounds, 0.0, "float32", 1, concurrency, groups * concurrency, 11, 0)
