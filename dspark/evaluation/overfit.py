"""The overfit gate: a drafter learns a handful of the target's own answers by heart, then drafts them in real decoding.

Whole blocks are accepted if, and only if, everything between the target and the accepted token fits together: taps,
positions, mask token, features as stored against features as decoded, teacher-forced blocks against drafted ones. A
mistake in any of them leaves tokens refused however long one trains, and is found here in minutes instead of in a real
training run, where it shows as a drafter that is not very good. It says nothing about quality: the first thing to run
for a new target, not the last.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dspark.config.models import DrafterSettings, FeatureSettings, LossSettings, TrainingSettings
from dspark.corpus.sequences import TokenSequence
from dspark.decoding.loop import decode
from dspark.decoding.proposers import torch_proposer
from dspark.decoding.records import Cycles, Decoded
from dspark.drafters.config import DrafterConfig
from dspark.errors import DataError
from dspark.features.extraction import extract
from dspark.features.sources import read_split
from dspark.io.progress import Progress
from dspark.targets.loading import Target
from dspark.training.trainer import train

LEARNED = 0.99  # of the slots at each position: the drafter's greedy token is the target's, after the text's own tokens
EVALUATIONS = 20  # at most, of a training run: each may end it
# Learning by heart wants other settings than learning: hard labels in full, as many anchors as there are, large steps.
BY_HEART = {
    "initial": None,
    "imported": None,
    "mixture": None,
    "anchors_per_sequence": 64,
    "optimizer": "muon",
}


class OverfitReport(BaseModel):
    """What `dspark overfit` found.

    Attributes:
        greedy_match: per draft position, after the text's own tokens; what training reached.
        cycles: of decoding, whose whole outcome is known: the end of an answer cuts its last block short.
        accepted: how many of these accepted 0, 1, ... gamma tokens.
        tokens_per_cycle: with the bonus token, gamma + 1 at most.
        equal_answers: that decoding with drafts gave token by token what the target alone gave.
        wanted_share: of whole blocks, that is asked for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["dspark/overfit/1"] = Field(default="dspark/overfit/1", alias="schema")
    target: str
    geometry: str
    gamma: int
    sequences: int
    response_tokens: int
    steps: int
    seconds: float  # of training
    greedy_match: list[float]
    cycles: int
    accepted: list[int]
    tokens_per_cycle: float
    equal_answers: int
    wanted_share: float

    @property
    def whole_blocks(self) -> int:
        """Cycles that accepted everything that was drafted."""
        return self.accepted[-1]

    @property
    def reached(self) -> bool:
        """Whether enough blocks were accepted whole."""
        return self.whole_blocks >= self.wanted_share * self.cycles

    @property
    def learned(self) -> bool:
        """Whether what training sees promises enough whole blocks; if not, it wants more steps."""
        return math.prod(self.greedy_match) >= self.wanted_share


def learned_by_heart(metrics: Mapping[str, Any]) -> bool:
    """Whether an evaluation (`development.dev_metrics`) leaves nothing to learn."""
    return bool(min(metrics["dev_greedy_match"]) >= LEARNED)


def overfit(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafter: DrafterSettings,
    training: TrainingSettings,
    *,
    steps: int,
    learning_rate: float,
    max_new_tokens: int,
    share: float,
    progress: Progress | None = None,
) -> OverfitReport:
    """Train on the target's greedy answers until they are known by heart, then decode the same prompts.

    Args:
        target: in its own dtype, as features are extracted.
        prompts: token ids, a handful.
        drafter: the recipe's.
        training: the recipe's, of which precision, lengths and seed are used.
        steps: at most.
        learning_rate: of Muon, at its highest.
        max_new_tokens: of each answer.
        share: of blocks that must be accepted whole.
    Raises:
        DataError: the answers are too short for one whole block.
        Interrupted: a stop was requested; nothing is kept.
    """
    progress = progress or Progress()
    config = DrafterConfig.of(target.record, drafter)
    progress.start("answers", len(prompts), unit="prompts")
    answers = decode(target, None, prompts, max_new_tokens=max_new_tokens, progress=progress)
    sequences = [
        TokenSequence(f"{number}#0", "overfit", [*prompt, *answer.token_ids], len(prompt), answer.finish_reason)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    if not any(len(answer.token_ids) > config.gamma + 1 for answer in answers):
        raise DataError(
            f"target {target.record.name} answers {len(prompts)} prompts with "
            f"{max(len(answer.token_ids) for answer in answers)} tokens at most, a block takes {config.gamma + 2}",
            "take prompts that are answered at length (another --build), or more of them (--sequences)",
        )
    with tempfile.TemporaryDirectory(prefix="dspark-overfit-") as name:
        scratch = Path(name)
        features = FeatureSettings(dtype=target.dtype_name)
        manifest = extract(target, {"train": sequences}, features, scratch / "features", progress)
        rows = read_split(manifest, "train", scratch / "features")
        result = train(
            config,
            target.embedding,
            target.head,
            rows,
            rows,
            _settings(training, drafter, steps, learning_rate, len(rows)),
            scratch / "work",
            progress,
            eos_token_ids=target.record.eos_token_ids,
            enough=learned_by_heart,
        )
    progress.start("decode", len(prompts), unit="prompts")
    proposer = torch_proposer(result.drafter.to(target.device, target.dtype))
    decoded = decode(target, proposer, prompts, max_new_tokens=max_new_tokens, progress=progress)
    cycles = Cycles.concatenate([one.cycles for one in decoded])
    known = cycles.known == cycles.gamma
    if not known.any():
        raise DataError("decoding came to no whole block before the answers ended", "raise --new-tokens")
    return OverfitReport(
        target=target.record.name,
        geometry=config.geometry,
        gamma=config.gamma,
        sequences=len(sequences),
        response_tokens=sum(len(answer.token_ids) for answer in answers),
        steps=result.metrics.steps,
        seconds=round(result.seconds, 1),
        greedy_match=result.metrics.best.dev_greedy_match,
        cycles=int(known.sum()),
        accepted=np.bincount(cycles.accepted[known], minlength=config.gamma + 1).tolist(),
        tokens_per_cycle=float(cycles.committed[known].mean()),
        equal_answers=sum(_same(one, other) for one, other in zip(decoded, answers, strict=True)),
        wanted_share=share,
    )


def _settings(
    training: TrainingSettings, drafter: DrafterSettings, steps: int, learning_rate: float, sequences: int
) -> TrainingSettings:
    """What suits a handful: every sequence in every step, and often a look at how far it is."""
    loss = LossSettings(labels="hard", cross_entropy=1.0, confidence=1.0 if drafter.confidence else 0.0)
    for_these = {
        "loss": loss,
        "steps": steps,
        "learning_rate": learning_rate,
        "sequences_per_step": sequences,
        "accumulation": min(training.accumulation, sequences),
        "dev_every_steps": max(1, steps // EVALUATIONS),
        "checkpoint_every_steps": steps,
    }
    return training.model_copy(update=BY_HEART | for_these)


def _same(one: Decoded, other: Decoded) -> bool:
    return one.token_ids == other.token_ids
