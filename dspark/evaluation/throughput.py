"""Tokens per second with drafts against plain decoding in the reference engine, in turn, on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dspark.decoding.clock import now
from dspark.decoding.loop import decode
from dspark.decoding.records import Decoded
from dspark.evaluation.results import LoadPoint, Pareto, ParetoPoint, ThroughputReport
from dspark.evaluation.rounds import NONE, Arm, Comparison, Request, Round, run_in_turn
from dspark.io.progress import Progress
from dspark.targets.loading import Target

__all__ = ["NONE", "Arm", "Comparison", "compare", "pareto", "round_of"]


def compare(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    *,
    rounds: int,
    max_new_tokens: int,
    concurrency: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Measure arms in turn (`rounds.run_in_turn`).

    Args:
        target: in the dtype to measure, on the threads to measure.
        arms: `none` among them.
        prompts: token ids; at least `concurrency`.
        rounds: at least two; ten or more for a figure that is quoted (package.md).
        progress: advanced by one per arm and round; the caller starts the task.
    Raises:
        SettingsError: no arm `none`, or two of one name.
        DataError: too few prompts.
    """

    def run(arm: Arm, group: int, tokens: int) -> Round:
        chosen = range(group * concurrency, (group + 1) * concurrency)
        started = now(target.device)
        decoded = decode(
            target,
            arm.proposer,
            [prompts[index] for index in chosen],
            max_new_tokens=tokens,
            policy=arm.policy,
            temperature=temperature,
            seeds=[seed + index for index in chosen],
            batch_size=concurrency,
        )
        return round_of(group, now(target.device) - started, decoded)

    done = run_in_turn(
        arms,
        run,
        prompts=len(prompts),
        concurrency=concurrency,
        rounds=rounds,
        max_new_tokens=max_new_tokens,
        progress=progress or Progress(),
    )
    return Comparison(
        arms=tuple(arms),
        rounds=done,
        temperature=temperature,
        dtype=target.dtype_name,
        threads=torch.get_num_threads(),
        concurrency=concurrency,
        prompts=min(rounds, len(prompts) // concurrency) * concurrency,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )


def round_of(group: int, seconds: float, decoded: Sequence[Decoded]) -> Round:
    """A round as the loop recorded it.

    Args:
        group: which prompts.
        seconds: wall time.
        decoded: every request of the round.
    """
    cycles = [one.cycles for one in decoded]
    return Round(
        group=group,
        seconds=seconds,
        requests=tuple(
            Request(tuple(one.token_ids), one.prefill_seconds, np.asarray(one.cycle_seconds, float), one.emitted)
            for one in decoded
        ),
        cycles=sum(len(one) for one in cycles),
        verified=sum(int(one.verified.sum()) for one in cycles),
        draft_seconds=sum(float(np.sum(one.draft_seconds)) for one in cycles),
        verify_seconds=sum(float(np.sum(one.verify_seconds)) for one in cycles),
    )


def pareto(report: Sequence[ThroughputReport]) -> Pareto:
    """All load points of some reports of one dtype and thread count, with the frontier marked."""
    points = [arm.load for part in report for arm in part.arms.values()]

    def beaten(point: LoadPoint) -> bool:
        total, user = point.tokens_per_second.value, point.tokens_per_second_per_user.value
        return any(
            other.tokens_per_second.value >= total
            and other.tokens_per_second_per_user.value >= user
            and (other.tokens_per_second.value, other.tokens_per_second_per_user.value) != (total, user)
            for other in points
        )

    return Pareto(
        dtype=report[0].dtype,
        threads=report[0].threads,
        points=tuple(ParetoPoint(**vars(point), on_frontier=not beaten(point)) for point in points),
    )
