"""Two answers that must not be mixed: the target says what its table says, and the sequential head keeps them apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.config.models import DrafterSettings, LossSettings, MarkovSettings, TrainingSettings
from dspark.decoding.loop import decode
from dspark.evaluation import two_modes
from dspark.evaluation.two_modes import (
    COMMA,
    COURSE,
    NO,
    OF,
    PLEASE,
    PROBLEM,
    Crossings,
    count_crossings,
    crossings,
    next_token_law,
    two_mode_target,
)

# Of the recipes dspark and dflash-tv: the same loss, as far as there is a head.
TRAINING = TrainingSettings(
    precision="float32",
    steps=240,
    sequences_per_step=16,
    anchors_per_sequence=16,
    max_length=64,
    learning_rate=1e-2,
    dev_every_steps=60,
    checkpoint_every_steps=240,
)
DSPARK = DrafterSettings(gamma=4, layers=1, markov=MarkovSettings(rank=8))
DFLASH_TV = DrafterSettings(gamma=4, layers=1, markov=MarkovSettings(type="none"), confidence=False)


def trained(drafter: DrafterSettings, seed: int) -> Crossings:
    loss = LossSettings(cross_entropy=0.1, l1=0.9, confidence=1.0 if drafter.confidence else 0.0)
    return crossings(two_mode_target(), drafter, TRAINING.model_copy(update={"loss": loss}), seed=seed)


def test_the_target_says_what_the_table_says() -> None:
    """Whatever stands before: all context is in the last token."""
    target = two_mode_target()
    law = next_token_law()
    assert np.allclose(law.sum(axis=1), 1)
    tokens = torch.tensor([[9, 30, PLEASE, OF, COURSE, COMMA, NO, PROBLEM], [PLEASE, NO, PROBLEM, COMMA, OF, 9, 0, 31]])
    with torch.no_grad():
        found = target.model(tokens).logits.softmax(-1).double().numpy()
    assert np.abs(found - law[tokens.numpy()]).max() < 1e-4


def test_the_target_never_crosses_its_answers_and_says_both() -> None:
    answers = decode(two_mode_target(), None, [[9, PLEASE]] * 40, max_new_tokens=24, temperature=1.0)
    said = [answer.token_ids for answer in answers]
    assert sum(count_crossings(np.array([one], np.int32))[0] for one in said) == 0
    first = [one[0] for one in said]
    assert 8 <= first.count(OF) <= 32 and first.count(OF) + first.count(NO) == 40  # p < 1e-4 for a fair coin


def test_crossings_are_counted_by_hand() -> None:
    drafted = [[OF, COURSE, COMMA, NO], [OF, PROBLEM, NO, COURSE], [NO, COMMA, OF, OF], [COURSE, PROBLEM, 9, NO]]
    # Phrases begun with a slot after: 1, 2, 2, 0 of which none, both, none.
    assert count_crossings(np.array(drafted, np.int32)) == (2, 5)
    assert count_crossings(np.zeros((0, 4), np.int32)) == (0, 0)


def test_requests_of_another_seed_are_others() -> None:
    one, two = (two_modes._requests(20, seed) for seed in (0, 1))
    assert one != two and all(request[-1] == PLEASE for request in one)


@pytest.mark.long
def test_the_sequential_head_keeps_two_answers_apart_where_independent_slots_mix_them() -> None:
    """Independent slots cross about half of their phrases: the first word is as likely the one as the other, and the
    second knows nothing of it. Over six seeds `benchmarks/two_modes.py` found lower bounds from 30 % on without the
    head, and with it not one crossed phrase; this is the first of them."""
    with_head, without = trained(DSPARK, 0), trained(DFLASH_TV, 0)
    assert with_head.phrases > 100 and without.phrases > 100
    assert without.rate.ci95[0] > 0.25
    assert with_head.rate.ci95[1] < 0.05
    assert with_head.acceptance.tau.value > without.acceptance.tau.value
