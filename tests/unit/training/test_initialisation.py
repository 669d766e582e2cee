from types import SimpleNamespace

import pytest
import torch

from dspark.config.models import LossSettings
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.anchors import anchor_candidates, response_mask
from dspark.training.batches import make_batch
from dspark.training.initialisation import LOGIT_DEVIATION, SMOOTHING, UNSEEN, bigrams, initialise
from dspark.training.objective import TrainingObjective, mean_losses
from dspark.training.vocabulary import draft_columns


def rows(*responses):
    return [SimpleNamespace(token_ids=torch.tensor([9, 9, *r]), prompt_length=2) for r in responses]


def test_bigrams_are_neighbouring_response_tokens():
    previous, following = bigrams(rows([5, 7, 5], [3, 4]), None)
    assert previous.tolist() == [5, 7, 3]
    assert following.tolist() == [7, 5, 4]
    columns = draft_columns(torch.tensor([5, 7]), 12)
    previous, following = bigrams(rows([5, 7, 5], [3, 4]), columns)
    assert (previous.tolist(), following.tolist()) == ([5, 7], [1, 0])


@pytest.mark.parametrize(("kind", "reduced"), [("vanilla", False), ("vanilla", True), ("gated", False), ("rnn", False)])
def test_with_rank_enough_the_bias_is_the_smoothed_conditional(config, target, kind, reduced):
    """n(5, 7) = 3, n(5, 6) = 1, n(7, 5) = 2, n(6, 5) = 1: seven pairs; p(v | u) by the formula, u = 5, 7 and unseen."""
    ids = torch.tensor([4, 5, 6, 7]) if reduced else None
    changes = {"markov_type": kind, "markov_rank": 8, "draft_vocab_size": 4 if reduced else None}
    drafter = DSparkDrafter(config.model_copy(update=changes), *target, ids)
    columns = draft_columns(ids, 24) if reduced else None
    initialise(drafter, rows([5, 7, 5, 7, 5, 6, 5, 7]), columns, seed=0)
    tokens = ids.tolist() if reduced else list(range(24))
    counts = {(5, 7): 3, (5, 6): 1, (7, 5): 2, (6, 5): 1}
    total = 7 + UNSEEN * len(tokens)
    p = {v: (UNSEEN + sum(n for (_, w), n in counts.items() if w == v)) / total for v in tokens}
    for u in (5, 7, 20):
        seen = sum(n for (w, _), n in counts.items() if w == u)
        expected = [(counts.get((u, v), 0) + SMOOTHING * p[v]) / (seen + SMOOTHING) for v in tokens]
        chain = drafter.chain()
        for hidden in torch.randn(3, 16, generator=torch.Generator().manual_seed(0)):  # whatever state, and slot
            found = torch.softmax(chain.bias(torch.tensor(u), hidden), -1)
            assert torch.allclose(found, torch.tensor(expected), atol=1e-4)
    assert kind == "rnn" or (drafter.markov_head.markov_w1.weight[:, 0] == 1).all()


def test_base_logits_start_small(config, target):
    drafter = DSparkDrafter(config, *target)
    initialise(drafter, rows([5, 7, 5]), None, seed=0)
    states = torch.randn(500, 16, generator=torch.Generator().manual_seed(0)) * drafter.norm.weight
    assert float(drafter.base_logits(states).detach().std()) == pytest.approx(LOGIT_DEVIATION, rel=0.1)


def test_the_start_is_a_function_of_the_seed_and_leaves_the_global_one_alone(config, target):
    drafters = []
    for _ in range(2):
        drafters.append(DSparkDrafter(config, *target))
        before = torch.get_rng_state()
        initialise(drafters[-1], rows([5, 7, 5, 8], [7, 8, 5]), None, seed=3)
        assert torch.equal(torch.get_rng_state(), before)
    one, two = (drafter.state_dict() for drafter in drafters)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_training_starts_below_the_loss_of_a_random_head(config, target, make_sequences):
    """On a target that counts, the last token tells the next: the prior is most of what there is to learn."""
    sequences = make_sequences(40)
    losses = []
    for prepared in (False, True):
        drafter = DSparkDrafter(config.model_copy(update={"markov_rank": 16}), *target)
        if prepared:
            initialise(drafter, sequences, None, seed=0)
        anchors = [anchor_candidates(response_mask(len(row.token_ids), row.prompt_length)) for row in sequences]
        batch = make_batch(sequences, anchors, config.gamma, None)
        objective = TrainingObjective(drafter, LossSettings(), low_precision=False)
        sums = objective(batch, objective.denominators(batch))[1]
        losses.append(mean_losses(sums.stacked())["cross_entropy"])
    assert losses[1] < losses[0] - 0.5
