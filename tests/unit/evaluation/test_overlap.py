"""Two requests that are together only for a while: their joint law, enumerated to the last draw.

The second one joins when the first one has had a cycle, and goes on when the first one has left, or the other way
round. Schedulers let each one's confidences decide what of the other is verified, so it is the joint law that has to be
the product of the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.decoding.drafting import Proposal, TorchProposer
from dspark.decoding.loop import ContinuousBatch
from dspark.decoding.policies import Fixed, Logits, Policy, ScheduledDelayed, parse_policy
from dspark.evaluation.enumeration import EnumeratingDraws, Law, enumerate_law, largest_difference, target_law
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.scheduling.candidates import rank
from dspark.scheduling.cost import CostCurve
from dspark.scheduling.delayed import DelayedPrefixScheduler
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import TargetOutput

EXACT, VISIBLE = 1e-12, 1e-3
BETWEEN = 9  # stands between the two texts in the joint law


class OneScript(EnumeratingDraws):
    """All requests draw from one script, so that a path is one of both."""

    def _choose(self, request: int, probs: np.ndarray) -> int:
        return super()._choose(0, probs)


def joint_law(
    make: Callable[[EnumeratingDraws], ContinuousBatch],
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    after: int = 1,
) -> tuple[Law, int, set[int]]:
    """Of both texts.

    Args:
        make: a batch on draws.
        after: cycles that the first request has before the second one joins.
    Returns:
        the law, how many paths it has, and the lengths that were verified where both were there.
    """
    lengths: set[int] = set()

    def run(draws: EnumeratingDraws, requests: int) -> list[list[int]]:
        draws.__class__ = OneScript
        batch = make(draws)
        done = {}
        for request, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            batch.join([prompt], [request], limit)
            for _ in range(after if request == 0 else 100):
                if batch.active:
                    batch.cycle()
            done |= batch.finished()
        lengths.update(
            int(count)
            for one in done.values()
            for count, rows in zip(one.cycles.verified, one.cycles.rows, strict=True)
            if rows == 2
        )
        return [[*done[0].token_ids, BETWEEN, *done[1].token_ids]]

    law, paths = enumerate_law(run, batch_size=1)
    return law, paths, lengths


def product(first: Law, second: Law) -> Law:
    return {(*a, BETWEEN, *b): p * q for a, p in first.items() for b, q in second.items()}


def scheduler(gamma: int, sps: Sequence[float], lag: int | None = None) -> PrefixScheduler:
    curve = CostCurve(sample_batch_tokens=tuple(range(1, len(sps) + 1)), sample_steps_per_second=tuple(sps),
                      max_batch_tokens=len(sps))  # fmt: skip
    return PrefixScheduler(curve, gamma) if lag is None else DelayedPrefixScheduler(curve, gamma, lag=lag)


# Steep enough for two random drafters' confidences to decide what is verified.
STEEP = (1.0, 0.72, 0.6, 0.46)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lag", "limits"),
    # Two steps late, both have to be there at the third step, which knows the first one's confidence.
    [("scheduled", None, [4, 3]), ("scheduled-delayed", 1, [4, 3]), ("scheduled-delayed", 2, [6, 4])],
    ids=["early stop", "one step late", "two steps late"],
)
def test_requests_that_overlap_for_a_while_keep_their_joint_law(name: str, lag: int | None, limits: list[int]):
    """A real target and drafter, with all caches: rows join, leave and move."""
    target = tiny_target(2, eos_token_ids=(1,), dtype=torch.float64)
    proposer = TorchProposer(tiny_drafter(target, 1), torch.float64)
    prompts = [[0, 0], [0, 0, 0]]

    def make(draws: EnumeratingDraws) -> ContinuousBatch:
        return ContinuousBatch(
            target, proposer, slots=2, positions=9, policy=parse_policy(name, scheduler=scheduler(1, STEEP, lag)),
            temperature=1.0, draws=draws, precision=torch.float64,
        )  # fmt: skip

    law, paths, lengths = joint_law(make, prompts, limits)
    first, second = (target_law(target, prompt, limit, 1.0) for prompt, limit in zip(prompts, limits, strict=True))
    assert largest_difference(law, product(first, second)) < EXACT
    assert paths > 50 and lengths == {0, 1}, "the scheduler verified the same number everywhere: nothing was tested"


# ---------------------------------------------------------------- confidences that give the second draft away


class Known:
    """A target that says 0 with .7 and 1 with .3 wherever it is asked; it takes no time."""

    class record:
        num_layers, max_position = 1, 64

    eos_token_ids: frozenset[int] = frozenset()
    device, packs = torch.device("cpu"), False
    law = torch.tensor([0.7, 0.3], dtype=torch.float64)

    def hidden(self, ids: Tensor, **rest: Any) -> TargetOutput:
        nothing = torch.zeros(*ids.shape, 1)
        return TargetOutput(nothing, nothing)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.log(self.law).expand(*hidden.shape[:-1], 2)


class Telltale:
    """Appendix A's drafter, whose second draft is always 0: c_1 = .8; c_2 = .9 after token 0 and 0 after token 1."""

    gamma = 2

    def begin(self, batch: int, max_length: int) -> None: ...
    def extend(self, features: Tensor, counts: np.ndarray, token_ids: Tensor) -> None: ...
    def join(self, features: Tensor, counts: np.ndarray, token_ids: Tensor) -> None: ...
    def keep(self, rows: Any) -> None: ...

    def propose(self, anchors: Tensor, temperature: float, draws: Any, requests: np.ndarray) -> Proposal:
        q = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64).expand(len(anchors), 2, 2)
        tokens = torch.stack([draws.categorical(q[:, slot], requests) for slot in range(2)], 1)
        second = torch.where(tokens[:, :1] == 0, np.log(9.0), -100.0)
        return Proposal(tokens, torch.cat([torch.full((len(anchors), 1), np.log(4.0)), second], 1), q, tokens)


class FromNow(ScheduledDelayed):
    """Sizes a step by the confidences of its own blocks: it looks at what the second draft follows."""

    def step(self, confidence_logits: Logits, requests: Any) -> np.ndarray:
        survival = self.scheduler.survival(confidence_logits)
        return rank(survival, 2).take(self.scheduler.capacity(survival)).astype(np.int64)


# Tokens per second without and with drafts. One request: 1, .9, then 1.13 if its first draft is 0 (appendix A). Two: 1,
# 1.26, 1.22, then 1.34 if one of the first drafts is 0, and 1.41 if both are.
# Early stop takes none of one request's and one of two's.
TELLING = (1.0, 0.5, 0.45, 0.34, 0.31, 0.28)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "exact"),
    [
        (parse_policy("scheduled", scheduler=scheduler(2, TELLING)), True),
        (ScheduledDelayed(scheduler(2, TELLING, 1)), True),
        (Fixed(2), True),
        (FromNow(scheduler(2, TELLING, 1)), False),
    ],
    ids=["early stop", "delayed", "whole blocks", "sized by its own confidences"],
)
def test_only_a_policy_that_looks_ahead_bends_the_joint_law(policy: Policy, exact: bool):
    limits = [3, 2]

    def make(draws: EnumeratingDraws) -> ContinuousBatch:
        return ContinuousBatch(Known(), Telltale(), slots=2, positions=8, policy=policy, temperature=1.0, draws=draws,
                               precision=torch.float64)  # fmt: skip

    law, _, _ = joint_law(make, [[0], [0]], limits)
    first, second = (_independent(limit) for limit in limits)
    difference = largest_difference(law, product(first, second))
    assert difference < EXACT if exact else difference > VISIBLE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "exact"),
    [(ScheduledDelayed(scheduler(2, TELLING, 2)), True), (FromNow(scheduler(2, TELLING, 2)), False)],
    ids=["delayed", "sized by its own confidences"],
)
def test_steps_that_are_sized_by_earlier_ones_keep_the_law_of_a_long_text(policy: Policy, exact: bool):
    """Up to five steps of one request, so that sizes come from steps that were sized by steps themselves."""
    cycles = 0

    def run(draws: EnumeratingDraws, requests: int) -> list[list[int]]:
        nonlocal cycles
        batch = ContinuousBatch(Known(), Telltale(), slots=1, positions=9, policy=policy, temperature=1.0, draws=draws,
                                precision=torch.float64)  # fmt: skip
        batch.join([[0]], [0], 6)
        while batch.active:
            batch.cycle()
        done = batch.finished()[0]
        cycles = max(cycles, len(done.cycles))
        return [done.token_ids]

    law, _ = enumerate_law(run, batch_size=1)
    difference = largest_difference(law, _independent(6))
    assert cycles >= 4
    assert difference < EXACT if exact else difference > VISIBLE


def _independent(tokens: int) -> Law:
    texts = np.ndindex(*[2] * tokens)
    return {text: float(np.prod([(0.7, 0.3)[token] for token in text])) for text in texts}
