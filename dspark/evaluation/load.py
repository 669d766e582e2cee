"""The reference engine at fixed numbers of requests, under one policy after the other, beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.config.models import LoadSettings
from dspark.decoding.drafting import Proposer
from dspark.decoding.policies import Fixed, NoDrafts, parse_policy
from dspark.errors import SettingsError
from dspark.evaluation.rounds import NONE, Arm, Comparison
from dspark.evaluation.throughput import compare
from dspark.io.progress import Progress
from dspark.scheduling.prefix import PrefixScheduler
from dspark.targets.loading import Target


def fixed_lengths(settings: LoadSettings, gamma: int) -> tuple[int, ...]:
    """The fixed lengths that take turns, ascending: those of the settings, else 1, 2, 4, ... and the whole block.

    Raises:
        SettingsError: a length that no block has.
    """
    if settings.lengths and max(settings.lengths) > gamma:
        raise SettingsError(
            f"load.lengths goes up to {max(settings.lengths)}, a block has {gamma} drafts", "name shorter ones"
        )
    powers = [1 << power for power in range(gamma.bit_length()) if 1 << power < gamma]
    return tuple(sorted({*settings.lengths} or {*powers, gamma}))


def load_arms(
    proposer: Proposer,
    settings: LoadSettings,
    *,
    scheduler: PrefixScheduler | None = None,
    temperatures: Sequence[float] | None = None,
) -> list[Arm]:
    """What takes turns: plain decoding, fixed lengths, and the policies of the settings, each by its own name.

    Args:
        scheduler: for policies that are scheduled.
        temperatures: for policies with a threshold, [gamma].
    Raises:
        SettingsError: a policy that does not exist, or is scheduled without a scheduler.
    """
    lengths = [Fixed(k) for k in fixed_lengths(settings, proposer.gamma)]
    chosen = [parse_policy(name, scheduler=scheduler, temperatures=temperatures) for name in settings.policies]
    return [Arm(NONE, None, NoDrafts()), *(Arm(policy.name, proposer, policy) for policy in (*lengths, *chosen))]


def measure_load(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    settings: LoadSettings,
    progress: Progress | None = None,
) -> list[Comparison]:
    """Interleaved rounds of all arms at every number of requests, ascending.

    Args:
        target: in the dtype to measure, on the threads to measure.
        arms: of `load_arms`.
        prompts: token ids, at least as many as the most requests.
    Raises:
        SettingsError: two arms of one name.
        DataError: too few prompts.
    """
    progress = progress or Progress()
    progress.start("measure load", len(settings.concurrency) * len(arms) * settings.rounds, unit="rounds")
    return [
        compare(
            target,
            arms,
            prompts,
            rounds=settings.rounds,
            max_new_tokens=settings.new_tokens,
            concurrency=concurrency,
            temperature=settings.temperature,
            seed=settings.seed,
            progress=progress,
        )
        for concurrency in settings.concurrency
    ]
