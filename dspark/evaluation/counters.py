"""An engine's own counters against the sequential loop in torch, replayed on the engine's replies.

The engine answers; torch replays the loop on exactly those answers, so that nothing hangs on how either decided
near-ties. Where the two count differently, the engine does not draft what the drafter was trained to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dspark.drafters.base import Drafter
from dspark.engines.client import Completion
from dspark.engines.counters import Counters
from dspark.engines.replay import ExpectedRequest, replay
from dspark.errors import DataError
from dspark.evaluation.agreement import compare_taus
from dspark.evaluation.entry import Agreement
from dspark.evaluation.paired import Counts
from dspark.evaluation.results import Acceptance
from dspark.io.progress import Progress
from dspark.measured import ratio_of_sums
from dspark.targets.loading import Target

TOLERANCE = 0.02  # relative difference of tau
# Shifted taps or a wrong RoPE base hardly move tau, but every prompt's counters. On SmolLM2 with a quantised target 21
# of 32 prompts had the counters of the replay, with either fault none or one.
FEWEST_EQUAL = 0.25  # share of prompts
FEWEST_PROMPTS = 8  # on which such a share says something by itself

# Under a scheduler fewer drafts are verified where little confidence is: the drafts that it leaves out are neither
# accepted nor refused, so that acceptance by position and tau are those of its choice, not of the drafter.
SHORTENED = (
    "the server chose how much of a block it verifies, so that tau and the acceptance of late positions are lower than "
    "those of whole blocks: start it without scheduling to compare"
)

Verdict = Literal["agrees", "disagrees", "inconclusive"]


@dataclass(frozen=True)
class Asked:
    """One prompt: what the engine did and what it should have done."""

    reply: Completion
    expected: ExpectedRequest

    @property
    def equal(self) -> bool:
        """True if the engine counted what the loop counts."""
        return self.reply.counters == self.expected.counters


def replay_all(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    replies: Sequence[Completion],
    *,
    max_new_tokens: int,
    n_max: int,
    cut: bool = True,
    progress: Progress,
) -> list[Asked]:
    """What the loop makes of every reply.

    Args:
        n_max: drafts of a block that the engine verifies at most.
        cut: whether it cuts the last block of a reply (`engines.replay`).
        progress: advanced by one per prompt; the task is started here.
    """
    progress.start("replay in torch", len(prompts), unit="prompts")
    asked = []
    for prompt, reply in zip(prompts, replies, strict=True):
        expected = replay(
            target, drafter, prompt, reply.token_ids, max_new_tokens, ended=reply.ended, n_max=n_max, cut=cut
        )
        asked.append(Asked(reply, expected))
        progress.advance()
    return asked


def compare_counters(asked: Sequence[Asked], *, tolerance: float = TOLERANCE, seed: int = 0) -> Agreement:
    """tau in the engine against tau of the replay, and how many prompts have equal counters."""
    offline, engine = (
        _tau_counts([one.expected.counters for one in asked]),
        _tau_counts([one.reply.counters for one in asked]),
    )
    found = compare_taus(offline, engine, tolerance=tolerance, seed=seed)
    return found.model_copy(update={"equal_counters": sum(one.equal for one in asked)})


def judge_counters(found: Agreement) -> tuple[Verdict, str | None]:
    """Whether the engine drafts what the drafter was trained to draft; if not, why."""
    few = found.equal_counters is not None and found.equal_counters < FEWEST_EQUAL * found.prompts
    counted = f"only {found.equal_counters} of {found.prompts} prompts have the counters of the replay"
    if few and found.result == "agrees":
        return "disagrees", f"tau agrees, but {counted}: the engine drafts something else"
    if found.result == "agrees":
        return "agrees", None
    far = f"tau is {found.engine_tau.value:.3f} in the engine and {found.offline_tau.value:.3f} offline"
    far += f", more than {found.tolerance:.0%} apart"
    if few and found.prompts >= FEWEST_PROMPTS:
        return "disagrees", f"{far}, and {counted}"
    if found.result == "inconclusive":
        return "inconclusive", f"{far}, on {found.prompts} prompts, which are too few to say by how much: take more"
    return found.result, far


def measure_counters(counters: Sequence[Counters], *, seed: int = 0) -> Acceptance:
    """Acceptance as an engine counts it: a block that is cut at a reply's limit counts as refused from there on.

    Args:
        counters: of each prompt.
    Raises:
        DataError: no step at all.
    """
    committed, steps = _tau_counts(counters)
    tau = ratio_of_sums(committed, steps, seed=seed)
    if tau is None:
        raise DataError("the engine verified no block on these prompts")
    length = max(len(one.per_position) for one in counters)
    reached = [steps, *(_accepted_at(counters, place) for place in range(length))]
    conditional = [ratio_of_sums(reached[place + 1], reached[place], seed=seed) for place in range(length)]
    marginal = [ratio_of_sums(reached[place + 1], steps, seed=seed) for place in range(length)]
    return Acceptance(
        tau=tau,
        conditional=tuple(rate for rate in conditional if rate is not None),
        marginal=tuple(rate for rate in marginal if rate is not None),
    )


def _tau_counts(counters: Sequence[Counters]) -> Counts:
    """Tokens committed in steps, and steps, per prompt."""
    steps = np.array([one.steps for one in counters], float)
    return steps + np.array([one.accepted for one in counters], float), steps


def _accepted_at(counters: Sequence[Counters], place: int) -> NDArray[np.float64]:
    return np.array([sum(one.per_position[place : place + 1]) for one in counters], float)
