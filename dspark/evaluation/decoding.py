"""Prompts of a split through the reference loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from dspark.config.models import EvaluationSettings
from dspark.corpus.prompts import PreparedPrompt
from dspark.decoding.drafting import Proposer
from dspark.decoding.loop import decode
from dspark.decoding.policies import Fixed
from dspark.decoding.records import RecordSet
from dspark.errors import DataError
from dspark.io.digest import digest_json
from dspark.io.progress import Progress
from dspark.targets.loading import Target

Prompt = TypeVar("Prompt")
FEWEST = 2  # prompts, without which there is no interval


def decode_prompts(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[PreparedPrompt],
    settings: EvaluationSettings,
    *,
    temperature: float,
    progress: Progress | None = None,
) -> RecordSet:
    """Decode with whole blocks verified, and keep what was decided.

    Args:
        settings: length limit, batch size and seed; a prompt's draws depend on the seed and its id alone.
        progress: advanced by one per prompt; the caller starts the task.
    """
    decoded = decode(
        target,
        proposer,
        [prompt.token_ids for prompt in prompts],
        max_new_tokens=settings.max_new_tokens,
        policy=Fixed(),
        temperature=temperature,
        seeds=[_seed(settings.seed, prompt.id) for prompt in prompts],
        batch_size=settings.batch_size,
        progress=progress,
    )
    return RecordSet(tuple(prompt.id for prompt in prompts), tuple(prompt.domain for prompt in prompts), tuple(decoded))


def that_fit(
    prompts: Sequence[Prompt],
    tokens: Callable[[Prompt], int],
    new_tokens: int,
    rooms: Iterable[int | None],
    *,
    needed: int = FEWEST,
) -> tuple[list[Prompt], int]:
    """The prompts that leave room for their reply, and how many others there are.

    Args:
        prompts: all that were chosen.
        tokens: of a prompt.
        new_tokens: of a reply, at most.
        rooms: positions that a request may have; None: no limit is known.
        needed: how many have to remain where as many were chosen; of fewer, one.
    Raises:
        DataError: too few remain.
    """
    room = min((one for one in rooms if one is not None), default=None)
    kept = [one for one in prompts if room is None or tokens(one) + new_tokens <= room]
    if prompts and len(kept) < (needed if len(prompts) >= needed else 1):
        raise DataError(
            f"{len(prompts) - len(kept)} of {len(prompts)} prompts do not fit with a reply of {new_tokens} tokens into "
            f"{room} positions, {len(kept)} are left",
            "give the engine a longer context, or ask for fewer tokens or more prompts",
        )
    return kept, len(prompts) - len(kept)


def first_prompts(prompts: Iterable[PreparedPrompt], per_domain: int) -> list[PreparedPrompt]:
    """At most so many prompts of each domain: the first ones, which are a fair sample (`corpus.prepare`)."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        if taken.get(prompt.domain, 0) < per_domain:
            taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
            chosen.append(prompt)
    return chosen


def spread_prompts(prompts: Iterable[PreparedPrompt], count: int) -> list[PreparedPrompt]:
    """`count` prompts that take turns among the domains, as far as there are."""
    ranked: list[tuple[int, int, PreparedPrompt]] = []
    seen: dict[str, int] = {}
    for prompt in prompts:
        rank = seen.setdefault(prompt.domain, 0)
        seen[prompt.domain] += 1
        ranked.append((rank, len(ranked), prompt))
    return [prompt for _, _, prompt in sorted(ranked, key=lambda entry: entry[:2])[:count]]


def _seed(seed: int, prompt_id: str) -> int:
    return int(digest_json([seed, prompt_id])[:16], 16)
