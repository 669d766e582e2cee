from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.decoding.drafting import TorchProposer, proposable
from dspark.decoding.draws import CounterDraws
from dspark.drafters.checkpoint import union_tensors
from dspark.drafters.dspark import DSparkDrafter
from dspark.evaluation.enumeration import EnumeratingDraws
from dspark.evaluation.tiny import tiny_drafter
from dspark.targets.loading import Target

CONTEXT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
LENGTHS = np.array([4, 2])
ANCHORS = torch.tensor([20, 21])


def ready(target: Target, drafter: DSparkDrafter) -> TorchProposer:
    proposer = TorchProposer(drafter)
    proposer.begin(2, 16)
    proposer.extend(target.hidden(CONTEXT).taps, LENGTHS)
    return proposer


def one_shot_hidden(target: Target, drafter: DSparkDrafter, row: int) -> torch.Tensor:
    """h of the block after `row`'s anchor, from the drafter's one-shot form; [gamma, d]."""
    length = int(LENGTHS[row])
    features = target.hidden(CONTEXT[row : row + 1, :length]).taps
    gamma = drafter.config.gamma
    return drafter.block_hidden(
        drafter.block_inputs(ANCHORS[row : row + 1, None]),
        drafter.project(features),
        torch.arange(length)[None],
        torch.arange(length, length + gamma)[None, None],
        torch.ones(1, 1, length, dtype=torch.bool),
    )[0, 0]


@torch.no_grad()
def test_a_greedy_block_is_the_markov_chain_of_arg_maxima(llama: Target):
    """Worked out row by row from the drafter's one-shot form, slot by slot."""
    drafter = tiny_drafter(llama, 3)
    proposal = ready(llama, drafter).propose(ANCHORS, 0.0, EnumeratingDraws([]), np.arange(2))
    for row in range(2):
        hidden, previous, chain = one_shot_hidden(llama, drafter, row), ANCHORS[row], drafter.chain()
        for slot in range(3):
            confidence = drafter.confidence_logits(hidden[slot], previous)
            torch.testing.assert_close(proposal.confidence_logits[row, slot], confidence, atol=1e-4, rtol=1e-4)
            previous = (drafter.base_logits(hidden[slot]) + chain.bias(previous, hidden[slot])).argmax()
            assert proposal.tokens[row, slot] == previous
    assert proposal.probs is None


@torch.no_grad()
def test_sampled_tokens_come_from_the_distribution_that_is_handed_on(llama: Target):
    """Scripts force the tokens; q must be the softmax given these tokens, in float32, at the temperature."""
    drafter = tiny_drafter(llama, 3)
    proposer = ready(llama, drafter)
    draws = EnumeratingDraws([(30, 31, 32), (33, 34, 35)])
    proposal = proposer.propose(ANCHORS, 0.7, draws, np.arange(2))
    assert proposal.tokens.tolist() == [[30, 31, 32], [33, 34, 35]]
    assert proposal.probs is not None and proposal.probs.dtype == torch.float32
    for row in range(2):
        hidden, previous, chain = one_shot_hidden(llama, drafter, row), ANCHORS[row], drafter.chain()
        weight = 1.0
        for slot in range(3):
            logits = drafter.base_logits(hidden[slot]) + chain.bias(previous, hidden[slot])
            torch.testing.assert_close(proposal.probs[row, slot], torch.softmax(logits / 0.7, -1), atol=1e-5, rtol=1e-3)
            previous = proposal.tokens[row, slot]
            weight *= proposal.probs[row, slot, previous].item()
        assert draws.weights[row] == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reduced_vocabulary_proposes_target_ids(llama: Target, temperature: float):
    ids = (3, 8, 21, 30, 39)
    proposer = ready(llama, tiny_drafter(llama, 3, draft_token_ids=ids))
    proposal = proposer.propose(ANCHORS, temperature, CounterDraws([1, 2]), np.arange(2))
    assert set(proposal.tokens.flatten().tolist()) <= set(ids)
    if temperature:
        assert proposal.probs is not None and proposal.indices is not None and proposal.token_ids is not None
        assert proposal.probs.shape == (2, 3, 5)
        assert torch.equal(proposal.token_ids[proposal.indices], proposal.tokens)
    else:
        assert proposal.token_ids is None


def test_dropping_a_row_keeps_the_other_ones_context(llama: Target):
    drafter = tiny_drafter(llama, 3)
    proposer = ready(llama, drafter)
    both = proposer.propose(ANCHORS, 0.0, CounterDraws([1, 2]), np.arange(2))
    proposer.keep([1])
    alone = proposer.propose(ANCHORS[1:], 0.0, CounterDraws([1, 2]), np.arange(1))
    assert alone.tokens.tolist() == both.tokens[1:].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_can_never_be_proposed_are_left_out(llama: Target, temperature: float):
    """A union checkpoint's whole vocabulary, of which five tokens are reachable, drafts as the reduced one does."""
    ids = (3, 8, 21, 30, 39)
    reduced = tiny_drafter(llama, 3, draft_token_ids=ids)
    config = reduced.config.model_copy(update={"draft_vocab_size": None})
    whole = DSparkDrafter(config, llama.embedding, llama.head)
    whole.load_state_dict(union_tensors(reduced))
    found = ready(llama, whole)
    assert found.drafter.config.draft_vocab_size == 5
    kept = ready(llama, whole)
    kept.drafter = whole
    blocks = [each.propose(ANCHORS, temperature, CounterDraws([1, 2]), np.arange(2)) for each in (found, kept)]
    assert blocks[0].tokens.tolist() == blocks[1].tokens.tolist()
    torch.testing.assert_close(blocks[0].confidence_logits, blocks[1].confidence_logits, atol=1e-4, rtol=1e-4)
    if temperature:
        few, all_tokens = blocks[0].probs, blocks[1].probs
        assert few is not None and all_tokens is not None
        torch.testing.assert_close(few, all_tokens[..., list(ids)])
        assert all_tokens.count_nonzero() <= few.numel()


def test_a_drafter_that_can_say_everything_is_kept_as_it_is(llama: Target):
    for drafter in (tiny_drafter(llama, 3), tiny_drafter(llama, 3, draft_token_ids=(2, 3))):
        assert proposable(drafter) is drafter


def test_a_proposer_needs_a_beginning(llama: Target):
    proposer = TorchProposer(tiny_drafter(llama, 2))
    assert proposer.gamma == 2
    with pytest.raises(RuntimeError, match="begin was not called"):
        proposer.keep([0])
