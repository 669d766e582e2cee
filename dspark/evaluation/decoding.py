"""Prompts through the reference loop."""

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
from dspark.evaluation.acceptance import measure_acceptance
from dspark.evaluation.results import Acceptance
from dspark.io.digest import digest_json
from dspark.io.progress import Progress
from dspark.targets.loading import Target

Prompt = TypeVar("Prompt")
FEWEST = 2  # prompts, without which there is no interval


def evaluate(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Acceptance:
    """How far drafts get: tau and acceptance by position over some prompts, whole blocks verified.

    tau = tokens committed / cycles, the bonus token of each cycle included (DSpark, section 2.1).

    Args:
        target: the model that verifies.
        proposer: what drafts for it, `Package.proposer(target)` for instance.
        prompts: token ids of the rendered prompts (`target.template.encode_chat`).
        max_new_tokens: of each reply.
        temperature: of target and drafts; 0: arg max.
        seed: of the draws and of the bootstrap.
        batch_size: requests decoded together at most; it changes no figure at temperature 0 but for near-ties.
        progress: advanced by one per prompt; the caller starts the task.
    Returns:
        tau in tokens per cycle, 1 to gamma + 1; conditional and marginal acceptance, [gamma] or up to the first
        position that no block reached; each with n prompts and its 95 % interval over them.
    Raises:
        DataError: no prompts, one that is empty or leaves no room for a reply, or every reply ended with its first
            token, before anything was drafted.
    """
    if not prompts:
        raise DataError("there are no prompts to evaluate on", "give token ids: target.template.encode_chat(messages)")
    decoded = decode(
        target,
        proposer,
        prompts,
        max_new_tokens=max_new_tokens,
        policy=Fixed(),
        temperature=temperature,
        seeds=[_seed(seed, str(index)) for index in range(len(prompts))],
        batch_size=batch_size,
        progress=progress,
    )
    if not any(len(one.cycles) for one in decoded):
        raise DataError(
            "every reply ended with its first token: nothing was drafted", "give other prompts or more new tokens"
        )
    return measure_acceptance(decoded, seed=seed)


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
