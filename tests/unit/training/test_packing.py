"""Packed training: what blocks see of other blocks, other sequences and later tokens."""

import numpy as np
import pytest
import torch

from dspark.config.models import LossSettings
from dspark.drafters.kinds import build_drafter
from dspark.training.methods import method_of

ANCHORS = [np.array([3, 9, 14]), np.array([2, 8])]  # of sequences of 20 tokens


@pytest.fixture
def make_drafter(config, target):
    def make(**changes):
        drafter = build_drafter(config.model_copy(update=changes), *target, seed=5)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        return drafter

    return make


@pytest.fixture
def drafter(make_drafter):
    return make_drafter(layers=2)


@pytest.fixture
def chain_drafter(make_drafter):
    return make_drafter(kind="eagle3", markov_type="none", markov_rank=0, confidence=False)


@pytest.fixture
def sequences(make_sequences):
    rows = make_sequences(2, seed=2, lengths=(20, 21))
    for row in rows:
        row.prompt_length = 2
    return rows


def hidden(drafter, sequences, anchors=ANCHORS):
    """h of every block or chain, [N, K, d], as a step computes them."""
    method = method_of(drafter.config)
    batch = method.batch(sequences, anchors, drafter.config, None, 20)
    states = method.objective(drafter, LossSettings(), low_precision=False).states(batch)
    if drafter.config.kind == "dspark":
        states = states[0]
    assert len(states) == len(batch.anchors) * drafter.config.gamma  # every slot is supervised here
    return states.view(len(batch.anchors), drafter.config.gamma, -1).detach()


def moved(before, after):
    """Blocks whose h changed."""
    return [index for index, (one, two) in enumerate(zip(before, after, strict=True)) if not torch.equal(one, two)]


@pytest.mark.parametrize("position", range(20))
def test_a_token_s_features_reach_the_blocks_behind_it_in_its_own_sequence_and_no_other(drafter, sequences, position):
    before = hidden(drafter, sequences)
    sequences[0].taps[position] += 5.0
    assert moved(before, hidden(drafter, sequences)) == [n for n, p in enumerate([3, 9, 14]) if p > position]


def test_a_block_s_anchor_reaches_no_other_block(drafter, sequences):
    before = hidden(drafter, sequences)
    for block, (row, anchor) in enumerate([(0, 3), (0, 9), (0, 14), (1, 2), (1, 8)]):
        token = sequences[row].token_ids[anchor].item()
        sequences[row].token_ids[anchor] = 2 + (token + 3) % 20
        assert moved(before, hidden(drafter, sequences)) == [block]
        sequences[row].token_ids[anchor] = token


@pytest.mark.parametrize("position", range(20))
def test_a_token_s_features_reach_the_chains_behind_it_alike(chain_drafter, sequences, position):
    before = hidden(chain_drafter, sequences)
    sequences[1].taps[position] += 5.0
    assert moved(before, hidden(chain_drafter, sequences)) == [3 + n for n, p in enumerate([2, 8]) if p > position]


def test_a_token_reaches_the_chains_that_read_it_in_its_own_sequence_alone(chain_drafter, sequences):
    """Chains read the text before their anchor, and three tokens of it from there on."""
    before = hidden(chain_drafter, sequences)
    for position in (1, 3, 5, 6, 12, 16, 17):
        token = sequences[0].token_ids[position].item()
        sequences[0].token_ids[position] = 2 + (token + 3) % 20
        reached = [n for n, p in enumerate([3, 9, 14]) if position < p + 3]
        assert moved(before, hidden(chain_drafter, sequences)) == reached
        sequences[0].token_ids[position] = token


def test_no_token_behind_an_anchor_is_an_input_of_its_block(drafter, sequences):
    """Labels and previous tokens enter the heads and the loss; the backbone has anchor and masks alone."""
    before = hidden(drafter, sequences)
    for row, anchors in zip(sequences, ANCHORS, strict=True):
        later = np.setdiff1d(np.arange(20), anchors)
        row.token_ids[later] = row.token_ids[later].flip(0)
    assert moved(before, hidden(drafter, sequences)) == []


@pytest.mark.parametrize("kind", ["drafter", "chain_drafter"])
def test_packed_sequences_give_what_each_gives_alone(request, sequences, kind):
    drafter = request.getfixturevalue(kind)
    together = hidden(drafter, sequences)
    alone = torch.cat([hidden(drafter, [row], [own]) for row, own in zip(sequences, ANCHORS, strict=True)])
    assert torch.allclose(together, alone, atol=1e-5)
    swapped = hidden(drafter, sequences[::-1], ANCHORS[::-1])
    assert torch.allclose(torch.cat([swapped[2:], swapped[:2]]), together, atol=1e-5)


@torch.no_grad()
def test_decoding_bit_by_bit_gives_the_blocks_of_training(drafter, sequences):
    """The context arrives in pieces that end at anchors and in between; rubbish follows what a verification keeps."""
    trained = hidden(drafter, sequences[:1], ANCHORS[:1])
    taps, tokens = sequences[0].taps, sequences[0].token_ids
    cache = drafter.new_cache(1, 20)
    found = []
    for start, stop in [(0, 3), (3, 5), (5, 9), (9, 10), (10, 14)]:
        piece = torch.cat([taps[start:stop], torch.full((3, taps.shape[1]), 1e3)])
        drafter.extend(cache, piece.unsqueeze(0), torch.tensor([stop - start]))
        if stop in (3, 9, 14):
            found.append(drafter.block_from_cache(tokens[stop : stop + 1], cache)[0])
    assert torch.allclose(torch.stack(found), trained, atol=1e-5)
