"""Two ways of saying yes: does a drafter mix them? The example of DSpark's section on the sequential head, measured.

A target answers every request with "of course" or with "no problem", as likely the one as the other, and which of them
is decided by its first word alone. A drafter that fills the slots of a block independently of each other knows that the
second word is "course" or "problem" and not which of the two was drafted before it, so half of its phrases are crossed:
"of problem", "no course". A sequential head hears the first word. The target is made for this: its next token depends
on the token before it alone, by a table, which its weights are worked out from; nothing of it is trained.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.config.models import DrafterSettings, FeatureSettings, TrainingSettings
from dspark.corpus.sequences import TokenSequence
from dspark.decoding.loop import decode
from dspark.decoding.proposers import torch_proposer
from dspark.drafters.config import DrafterConfig
from dspark.errors import DataError
from dspark.evaluation.acceptance import measure_acceptance
from dspark.evaluation.results import Acceptance
from dspark.evaluation.tiny import tiny_target
from dspark.features.extraction import extract
from dspark.features.sources import read_split
from dspark.measured import Measured, ratio_of_sums
from dspark.targets.loading import Target
from dspark.training.trainer import train

VOCABULARY = 32
EOS, PLEASE, COMMA, STOP = 1, 2, 3, 4
OF, COURSE, NO, PROBLEM = 5, 6, 7, 8
WORDS = range(9, VOCABULARY)  # of requests
PHRASES = {OF: COURSE, NO: PROBLEM}
AGAIN = 0.8  # probability of another phrase after a phrase
NEVER = -20.0  # logit of what is never said

SEQUENCES = {"train": 64, "dev": 16}
PROMPTS = 64  # that are drafted for
NEW_TOKENS = 24


@dataclass(frozen=True)
class Crossings:
    """What a drafter drafted, temperature 1.

    Attributes:
        rate: drafted phrases whose second word is the other's, of all whose first word was drafted, over prompts.
        phrases: how many these are.
        acceptance: of the blocks.
    """

    rate: Measured
    phrases: int
    acceptance: Acceptance


def next_token_law() -> NDArray[np.float64]:
    """Probability of each token (column) after each token (row), [V, V]."""
    law = np.zeros((VOCABULARY, VOCABULARY))
    for before in (PLEASE, COMMA):
        law[before, list(PHRASES)] = 1 / len(PHRASES)
    for first, second in PHRASES.items():
        law[first, second] = 1
        law[second, [COMMA, STOP]] = AGAIN, 1 - AGAIN
    law[STOP, EOS] = 1
    for other in (0, EOS, *WORDS):  # said by users alone
        law[other, PLEASE] = 1
    return law


def two_mode_target() -> Target:
    """A Llama whose next-token distribution is `next_token_law`, but for 2e-9 of what is never said."""
    target = tiny_target(VOCABULARY, eos_token_ids=(EOS,))
    model = target.model
    width = target.record.hidden_size
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights.zero_()  # a layer hands on what it gets
        # A token's embedding is its own axis, which the last norm stretches to sqrt(width).
        target.embedding.copy_(torch.eye(VOCABULARY, width))
        logits = np.log(np.maximum(next_token_law(), math.exp(NEVER)))
        target.head.copy_(torch.from_numpy(logits.T / math.sqrt(width)))
    return target


def crossings(target: Target, drafter: DrafterSettings, training: TrainingSettings, *, seed: int) -> Crossings:
    """Train a drafter on the target's own answers, let it draft for other requests, and count crossed phrases.

    Args:
        target: of `two_mode_target`.
        drafter: what is trained.
        training: how; its seed is replaced.
        seed: of requests, answers and training.
    Raises:
        DataError: no phrase was drafted.
    """
    config = DrafterConfig.of(target.record, drafter)
    requests = _requests(sum(SEQUENCES.values()) + PROMPTS, seed)
    learned = requests[:-PROMPTS]
    answers = decode(
        target,
        None,
        learned,
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
        seeds=[_number(seed, index) for index in range(len(learned))],
    )
    rows = [
        TokenSequence(f"{index}#0", "requests", [*request, *answer.token_ids], len(request), answer.finish_reason)
        for index, (request, answer) in enumerate(zip(learned, answers, strict=True))
    ]
    splits = {"train": rows[: SEQUENCES["train"]], "dev": rows[SEQUENCES["train"] :]}
    with tempfile.TemporaryDirectory(prefix="dspark-two-modes-") as name:
        scratch = Path(name)
        manifest = extract(target, splits, FeatureSettings(dtype="float32"), scratch / "features")
        result = train(
            config,
            target.embedding,
            target.head,
            read_split(manifest, "train", scratch / "features"),
            read_split(manifest, "dev", scratch / "features"),
            training.model_copy(update={"seed": seed}),
            scratch / "work",
            eos_token_ids=(EOS,),
        )
    decoded = decode(
        target,
        torch_proposer(result.drafter),
        requests[-PROMPTS:],
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
        seeds=[_number(seed, len(learned) + index) for index in range(PROMPTS)],
    )
    counts = np.array([count_crossings(one.cycles.drafted) for one in decoded], np.float64)  # [prompts, 2]
    rate = ratio_of_sums(counts[:, 0], counts[:, 1], seed=seed)
    if rate is None:
        raise DataError("no phrase was drafted", "train for more steps, or draft blocks of at least 2")
    return Crossings(rate, int(counts[:, 1].sum()), measure_acceptance(decoded, seed=seed))


def count_crossings(drafted: NDArray[np.int32]) -> tuple[int, int]:
    """Crossed phrases, and phrases whose first word was drafted with a slot after it.

    Args:
        drafted: token ids of some blocks, [C, gamma].
    """
    before, after = drafted[:, :-1], drafted[:, 1:]
    crossed = sum(
        int(((before == first) & (after == second)).sum())
        for first in PHRASES
        for other, second in PHRASES.items()
        if other != first
    )
    return crossed, int(np.isin(before, list(PHRASES)).sum())


def _requests(count: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    words = [generator.choice(list(WORDS), size=generator.integers(2, 6)).tolist() for _ in range(count)]
    return [[*request, PLEASE] for request in words]


def _number(seed: int, index: int) -> int:
    """A seed of draws that no other request of any seed has."""
    return seed * 1_000_003 + index
