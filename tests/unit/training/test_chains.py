"""The objective of chains against a plain reading of deepspec.md, section 4.1, one chain and one step at a time."""

import math

import numpy as np
import pytest
import torch

from dspark.config.models import LossSettings
from dspark.drafters.kinds import build_drafter
from dspark.training.chains import make_chain_batch
from dspark.training.methods import method_of
from dspark.training.trainer import train

DECAY = 0.8
ANCHORS = [[3, 5], [2], [4, 6, 7]]


@pytest.fixture
def eagle3(config):
    fields = {"kind": "eagle3", "markov_type": "none", "markov_rank": 0, "confidence": False}
    return config.model_copy(update=fields)


@pytest.fixture
def settings():
    return LossSettings(labels="soft", cross_entropy=1, l1=0, confidence=0, decay=-1 / math.log(DECAY))


@pytest.fixture
def sequences(make_sequences):
    return make_sequences(3, seed=2, lengths=(10, 12))


@pytest.fixture
def drafter(eagle3, target):
    drafter = build_drafter(eagle3, *target, seed=5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return drafter


def candidates(sequence):
    return range(sequence.prompt_length, len(sequence.token_ids) - 1)


def plain(drafter, head, sequences, gamma=3):
    """Mean over sequences of 1 / T times the sum of weighted cross entropies, scaled up to all candidates."""
    total = 0.0
    for sequence, anchors in zip(sequences, ANCHORS, strict=True):
        tokens, length = sequence.token_ids, len(sequence.token_ids)
        found = 0.0
        for p in anchors:
            projected = drafter.project(sequence.taps[:p])[None]
            chains = drafter.chains(drafter.pairs(projected, tokens[None, 1 : p + 1]), projected[:, -1:], _at(p))
            for j in range(gamma):
                if p + 1 + j >= length:
                    break
                logits = drafter.step(chains, tokens[None, None, p + j])[0, 0] @ head.T
                known = torch.softmax(head @ sequence.last_hidden[p + j], -1)
                found = found - DECAY**j * (known * torch.log_softmax(logits, -1)).sum()
        total = total + found * len(candidates(sequence)) / len(anchors) / length
    return total / len(sequences)


def _at(position):
    return torch.tensor([[position]])


def objective_of(drafter, settings):
    return method_of(drafter.config).objective(drafter, settings, low_precision=False)


def test_the_objective_and_its_gradients_are_the_plain_formula(drafter, target, sequences, settings):
    batch = make_chain_batch(sequences, [np.array(row) for row in ANCHORS], 3, None)
    objective = objective_of(drafter, settings)
    found = objective(batch, objective.denominators(batch))[0]
    expected = plain(drafter, target[1], sequences)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    parameters = list(drafter.parameters())
    for one, two in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
        assert bool((one != 0).any())


def test_two_processes_parts_add_up_to_the_whole(drafter, sequences, settings):
    """Denominators are summed over processes, objectives as well."""
    anchors = [np.array(row) for row in ANCHORS]
    objective = objective_of(drafter, settings)
    parts = [
        make_chain_batch(sequences[:1], anchors[:1], 3, None),
        make_chain_batch(sequences[1:], anchors[1:], 3, None),
    ]
    whole = make_chain_batch(sequences, anchors, 3, None)
    denominators = sum(objective.denominators(part) for part in parts)
    assert torch.equal(denominators, objective.denominators(whole))
    added = sum(objective(part, denominators)[0] for part in parts)
    torch.testing.assert_close(added, objective(whole, denominators)[0], atol=1e-6, rtol=1e-6)


def test_anchors_that_were_not_drawn_are_stood_for(drafter, sequences, settings):
    """The mean over all ways to draw one anchor is the loss of all of them together."""
    objective = objective_of(drafter, settings)

    def loss(anchors):
        batch = make_chain_batch(sequences[:1], [np.array(anchors)], 3, None)
        return objective(batch, objective.denominators(batch))[0].item()

    everything = list(candidates(sequences[0]))
    assert len(everything) > 3
    assert np.mean([loss([anchor]) for anchor in everything]) == pytest.approx(loss(everything), rel=1e-5)


def test_a_longer_sequence_cut_at_the_limit_counts_as_long_as_it_is_read(sequences):
    batch = make_chain_batch(sequences[:1], [np.array([4])], 3, None, max_length=8)
    there = 8 - 1 - sequences[0].prompt_length
    assert float(batch.shares[0]) == pytest.approx(there / 8)
    assert batch.chain_ids.tolist() == [sequences[0].token_ids[4:7].tolist()]


def test_chains_are_packed_with_what_they_read(sequences):
    """Contexts of 5 and of 2 positions; the second chain of the first sequence reads one token more than there is."""
    first, second = sequences[0], sequences[1]
    batch = make_chain_batch([first, second], [np.array([3, 5]), np.array([2])], 3, None, max_length=7)
    assert batch.following_ids.tolist() == [*first.token_ids[1:6].tolist(), *second.token_ids[1:3].tolist()]
    assert batch.starts.tolist() == [2, 4, 5 + 1]  # positions 2 and 4 of the first context, 1 of the second
    assert batch.chain_ids.tolist() == [
        first.token_ids[3:6].tolist(),
        [*first.token_ids[5:7].tolist(), 0],
        second.token_ids[2:5].tolist(),
    ]


def test_no_chain_starts_at_the_first_token(sequences):
    sequences[0].prompt_length = 0
    with pytest.raises(ValueError, match="starts from the features before its anchor"):
        make_chain_batch(sequences[:1], [np.array([0, 4])], 3, None)


def test_training_learns_a_target_that_counts(eagle3, target, make_sequences, make_settings, tmp_path):
    """The next token is the last one + 1, of which the target is nearly sure: whole chains are found."""
    settings = make_settings(
        steps=60,
        dev_every_steps=60,
        checkpoint_every_steps=60,
        anchors_per_sequence=16,
        learning_rate=2e-2,
        loss={"labels": "soft", "cross_entropy": 1, "l1": 0, "confidence": 0, "decay": -1 / math.log(DECAY)},
    )
    result = train(eagle3, *target, make_sequences(24), make_sequences(6, seed=1), settings, tmp_path)
    assert result.metrics.best.dev_anchor_tau > 3.0  # of at most 1 + 3
    assert result.metrics.geometry == "eagle3-g3-l1-v24"
    assert result.curves[-1]["loss"] == pytest.approx(result.curves[-1]["cross_entropy"])
