"""How many positions requests need, and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dspark.errors import DataError

if TYPE_CHECKING:
    from dspark.decoding.drafting import Proposer
    from dspark.decoding.policies import Policy
    from dspark.targets.loading import Target

NewTokens = int | Sequence[int]  # of all requests, or of each


def drafting(proposer: Proposer | None, policy: Policy) -> Proposer | None:
    """What drafts under a policy; None: nothing does.

    Raises:
        ValueError: the policy verifies drafts and there is no proposer.
    """
    if policy.drafts and proposer is None:
        raise ValueError(f"policy {policy.name} needs a proposer")
    return proposer if policy.drafts else None


def positions_for(
    target: Target,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: NewTokens,
    requests: Sequence[int] | None = None,
) -> int:
    """Positions that a slot needs for any of some prompts: the prompt, its answer, and a block past the limit.

    Args:
        proposer: what drafts (`drafting`).
        requests: how errors call the prompts; None: by their places.
    Raises:
        DataError: an empty prompt, or one that leaves no room below the target's largest position.
    """
    beyond = beyond_prompts(proposer, prompts, max_new_tokens)
    names = range(len(prompts)) if requests is None else requests
    check_room(prompts, names, beyond, target.record.max_position, "the target's")
    return max(len(prompt) + more for prompt, more in zip(prompts, beyond, strict=True))


def beyond_prompts(proposer: Proposer | None, prompts: Sequence[Sequence[int]], max_new_tokens: NewTokens) -> list[int]:
    """Positions after each prompt: of its answer, and of a block past the limit."""
    gamma = proposer.gamma if proposer is not None else 0
    return [limit + gamma for limit in limits_of(prompts, max_new_tokens)]


def limits_of(prompts: Sequence[Sequence[int]], max_new_tokens: NewTokens) -> list[int]:
    """The limit of each prompt's answer."""
    return [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)


def check_room(
    prompts: Sequence[Sequence[int]], requests: Sequence[int], beyond: Sequence[int], limit: int, whose: str
) -> None:
    """Refuse prompts that cannot be decoded.

    Args:
        requests: how errors call the prompts.
        beyond: positions after each prompt.
        limit: positions that there are.
        whose: these are, for the message.
    Raises:
        DataError: an empty prompt, or one that is too long with what comes beyond it.
    """
    for request, prompt, more in zip(requests, prompts, beyond, strict=True):
        if not len(prompt):
            raise DataError(f"prompt {request} is empty")
        if len(prompt) + more > limit:
            raise DataError(
                f"prompt {request} has {len(prompt)} tokens; with {more} more it would pass {whose} {limit} positions",
                "lower max_new_tokens or the prompt length limit",
            )
