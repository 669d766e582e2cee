"""What an engine will do at a number of requests, from what single requests did and what a step costs.

Rounds are played on paper. A request is one of the recorded prompts and says as many tokens as that one did; each of
its cycles is one of that prompt's, drawn at random, with the confidences that the drafter stated and the drafts that
the target accepted. The policy itself chooses how much of it is verified, a cost table tells how long the step of all
requests takes, and requests end one by one, as they do in a round that is measured. What goes beyond
L = (T_draft + T_verify) / tau (DSpark, section 2.1) is therefore what that leaves out: that a policy looks at a whole
batch, and that a batch shrinks. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dspark.decoding.policies import Policy, Remembering
from dspark.decoding.prefixes import Counts
from dspark.decoding.records import Decoded
from dspark.errors import DataError, SettingsError
from dspark.evaluation.results import Model

Floats = NDArray[np.float64]


class StepTimes(Protocol):
    """What a cycle of an engine takes."""

    def drafting(self, lengths: Counts, contexts: Counts) -> float:
        """Seconds of a cycle that drafts a block for every request and verifies some of it.

        Args:
            lengths: drafts to verify of each request, [rows].
            contexts: tokens of each request before the cycle, [rows].
        """
        ...

    def plain(self, contexts: Counts) -> float:
        """Seconds of a cycle of plain decoding."""
        ...


class Prediction(Model):
    """What a policy will do at a number of requests, after everybody's first token: prefills are no part of it."""

    tau: float = Field(ge=1)  # tokens per request and cycle; a cycle cut by the end of an answer counts what it said
    tokens_per_second: float = Field(gt=0)  # of all requests, until the last of them is done
    tokens_per_second_per_user: float = Field(gt=0)  # of a request while it lasts
    latency_per_token_seconds: float = Field(gt=0)  # the inverse of it
    verified_tokens_per_request: float = Field(ge=0)  # drafts verified per request and cycle


@dataclass(frozen=True)
class Recorded:
    """What some prompts did with whole blocks verified; cycles of all prompts one after the other.

    Attributes:
        prompt_tokens: of each prompt, [prompts].
        new_tokens: of each answer, the first one included, [prompts].
        first, cycles: where the cycles of each prompt begin, and how many there are, [prompts].
        accepted: drafts that the target accepted, [cycles of all].
        confidence_logits: [cycles of all, gamma]; NaN without a confidence head.
    """

    prompt_tokens: Counts
    new_tokens: Counts
    first: Counts
    cycles: Counts
    accepted: Counts
    confidence_logits: NDArray[np.float32]

    @classmethod
    def of(cls, decoded: Sequence[Decoded], max_new_tokens: int) -> Recorded:
        """What records say.

        Args:
            decoded: of one sampling, with whole blocks verified.
            max_new_tokens: of the answers that are predicted, at most as many as could be said here.
        Raises:
            SettingsError: longer answers are to be predicted than were recorded.
            DataError: no cycle was recorded, or not with whole blocks verified.
        """
        limit = max((len(one.token_ids) for one in decoded if one.finish_reason == "length"), default=math.inf)
        if max_new_tokens > limit:
            raise SettingsError(
                f"answers of {max_new_tokens} tokens cannot be predicted from records of {limit} at most",
                "predict shorter ones, or evaluate longer ones: --set evaluation.max_new_tokens=N",
            )
        kept = []
        for one in decoded:
            cycles = one.cycles
            if (cycles.verified != cycles.gamma).any() or not cycles.gamma:
                raise DataError(f"records of policy {one.policy} say nothing of drafts that were not verified")
            # A block that drafts an end does not tell how far it would have gone where that was accepted, and kept only
            # where it was not it would count against the drafts. The limit cuts texts, not what was accepted.
            said = 1 + np.cumsum(cycles.committed) - cycles.committed
            whole = cycles.known >= np.minimum(cycles.gamma, limit - said)
            kept.append(np.flatnonzero(whole if whole.any() else np.ones(len(cycles), bool)))
        counts = np.array([len(places) for places in kept], np.int64)
        if not counts.sum():
            raise DataError("no recorded answer has a second token: there is nothing to predict from")
        pairs = list(zip(decoded, kept, strict=True))
        return cls(
            prompt_tokens=np.array([one.prompt_length for one in decoded], np.int64),
            new_tokens=np.array([min(len(one.token_ids), max_new_tokens) for one in decoded], np.int64),
            first=np.cumsum(counts) - counts,
            cycles=counts,
            accepted=np.concatenate([one.cycles.accepted[places] for one, places in pairs]).astype(np.int64),
            confidence_logits=np.concatenate([one.cycles.confidence_logits[places] for one, places in pairs]),
        )

    def __len__(self) -> int:
        return len(self.new_tokens)

    @property
    def gamma(self) -> int:
        """Drafts of a block."""
        return int(self.confidence_logits.shape[1])

    def cut(self, gamma: int) -> Recorded:
        """The same with the first `gamma` drafts of every block; what stands behind has no part in them."""
        if not 1 <= gamma <= self.gamma:
            raise SettingsError(f"blocks of {self.gamma} drafts say nothing of {gamma}")
        return replace(
            self, accepted=np.minimum(self.accepted, gamma), confidence_logits=self.confidence_logits[:, :gamma]
        )


def predict(
    recorded: Recorded, policy: Policy, concurrency: int, times: StepTimes, *, rounds: int = 24, seed: int = 0
) -> Prediction:
    """Play rounds of so many requests that begin together.

    Args:
        recorded: at the sampling that is predicted.
        policy: with a memory of its own if it has one.
        times: of the engine's cycles.
        rounds: played; each takes prompts at random.
        seed: of prompts and cycles, which are the same for every policy.
    Raises:
        DataError: no answer has a second token, or the cost table does not go so far.
    """
    generator = np.random.default_rng(seed)
    totals = np.zeros(len(_TOTALS))
    for _ in range(rounds):
        chosen = generator.choice(len(recorded), concurrency, replace=concurrency > len(recorded))
        # Which cycle a request's n-th one is, whoever else is there: a policy that accepts more is then never slower by
        # the luck of the draw.
        luck = generator.random((concurrency, int(recorded.new_tokens.max())))
        totals += _round(recorded, policy, chosen, luck, times)
    emitted, cycles, verified, wall, of_requests = totals
    if not emitted:
        raise DataError("no recorded answer has a second token: there is nothing to predict from")
    return Prediction(
        tau=emitted / cycles,
        tokens_per_second=emitted / wall,
        tokens_per_second_per_user=emitted / of_requests,
        latency_per_token_seconds=of_requests / emitted,
        verified_tokens_per_request=verified / cycles,
    )


_TOTALS = ("emitted", "cycles", "verified", "wall_seconds", "seconds_of_requests")


def _round(recorded: Recorded, policy: Policy, chosen: Counts, luck: Floats, times: StepTimes) -> Floats:
    """`_TOTALS` of one round."""
    if isinstance(policy, Remembering):
        policy.begin()
    left = recorded.new_tokens[chosen] - 1  # the prefill says the first token
    contexts = recorded.prompt_tokens[chosen].copy()
    totals = np.zeros(len(_TOTALS))
    number = 0
    while (rows := np.flatnonzero(left > 0)).size:
        asked = chosen[rows], rows, luck[rows, number], contexts[rows]
        lengths, gained, seconds = _cycle(recorded, policy, *asked, times)
        emitted = np.minimum(gained, left[rows])
        left[rows] -= emitted
        contexts[rows] += emitted
        totals += np.array([emitted.sum(), rows.size, lengths.sum(), seconds, seconds * rows.size])
        number += 1
    return totals


def _cycle(
    recorded: Recorded,
    policy: Policy,
    prompts: Counts,
    rows: Counts,
    luck: Floats,
    contexts: Counts,
    times: StepTimes,
) -> tuple[Counts, Counts, float]:
    """Drafts verified and tokens gained of each request, [rows], and the seconds of the step."""
    if not policy.drafts:
        return np.zeros_like(rows), np.ones_like(rows), times.plain(contexts)
    drawn = recorded.first[prompts] + (luck * recorded.cycles[prompts]).astype(np.int64)
    logits = recorded.confidence_logits[drawn]
    lengths = policy.step(logits, rows) if isinstance(policy, Remembering) else policy.lengths(logits)
    return lengths, np.minimum(recorded.accepted[drawn], lengths) + 1, times.drafting(lengths, contexts)
