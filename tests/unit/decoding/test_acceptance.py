from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.decoding.acceptance import accept_greedy, accept_sampled, distribution, residual
from dspark.decoding.drafting import Proposal
from dspark.evaluation.enumeration import EnumeratingDraws, enumerate_law

P = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]], dtype=torch.float64)  # after 0, 1, 2 drafts
Q = torch.tensor([[0.2, 0.7, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def drafted(tokens: Tensor, probs: Tensor, **kwargs: Tensor) -> Proposal:
    return Proposal(tokens, torch.zeros(tokens.shape), probs=probs, indices=kwargs.pop("indices", tokens), **kwargs)


def test_a_distribution_is_a_float32_softmax_whatever_the_logits_are():
    logits = torch.tensor([[0.0, 1.0, 3.0]], dtype=torch.bfloat16)
    probs = distribution(logits, 2.0)
    expected = np.exp(np.array([0, 0.5, 1.5])) / np.exp(np.array([0, 0.5, 1.5])).sum()
    assert probs.dtype == torch.float32
    np.testing.assert_allclose(probs[0].numpy(), expected, rtol=1e-6)
    assert distribution(logits, 1.0, torch.float64).dtype == torch.float64


def test_greedy_accepts_matches_up_to_the_first_difference():
    """Arg maxima 2, 0, 1, 1 after 0, 1, 2, 3 drafts."""
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 0, 1, 1]] * 4), 3).float()
    drafts = torch.tensor([[2, 0, 1], [2, 1, 1], [0, 0, 1], [2, 0, 1]])
    accepted, following = accept_greedy(logits, drafts, lengths(3, 3, 3, 2))
    assert accepted.tolist() == [3, 1, 0, 2]
    assert following.tolist() == [1, 0, 2, 1]


def test_greedy_without_drafts_is_the_arg_max():
    accepted, following = accept_greedy(torch.tensor([[[0.0, 5.0, 1.0]]]), torch.zeros(1, 0), lengths(0))
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_residual_is_what_the_drafter_left_over():
    """max(p - q, 0) of (.5,.2,.3) and (.2,.7,.1) is (.3,0,.2), mass .5."""
    np.testing.assert_allclose(residual(P[:1], Q[:1]).numpy(), [[0.6, 0.0, 0.4]])


def test_residual_of_a_reduced_draft_vocabulary_keeps_all_that_the_drafter_cannot_say():
    """q = (.9,.1) on tokens 2 and 0: p - q = (.4,.2,-.6)."""
    ids = torch.tensor([2, 0])
    left = residual(P[:1], torch.tensor([[0.9, 0.1]]), ids)
    np.testing.assert_allclose(left.numpy(), [[2 / 3, 1 / 3, 0.0]], rtol=1e-6)


def test_residual_of_equal_distributions_falls_back_to_the_target():
    np.testing.assert_allclose(residual(P[:1], P[:1]).numpy(), P[:1].numpy())


def block_law(target: Tensor, drafter: Tensor, rule) -> dict[tuple[int, ...], float]:
    """Law of accepted tokens and the one after them, drawing the drafts from `drafter` inside the enumeration."""

    def run(draws: EnumeratingDraws, n: int) -> list[list[int]]:
        requests = np.arange(n)
        tokens = [draws.categorical(drafter[j].expand(n, -1), requests) for j in range(len(drafter))]
        proposal = drafted(torch.stack(tokens, 1), drafter.expand(n, -1, -1))
        accepted, following = rule(target.expand(n, -1, -1), proposal, np.full(n, len(drafter)), draws, requests)
        return [[*row[:count], last] for row, count, last in
                zip(proposal.tokens.tolist(), accepted, following.tolist(), strict=True)]  # fmt: skip

    return enumerate_law(run)[0]


def first_token(law: dict[tuple[int, ...], float]) -> list[float]:
    return [sum(weight for text, weight in law.items() if text[0] == token) for token in range(3)]


def second_token_after(law: dict[tuple[int, ...], float], first: int) -> list[float]:
    longer = {text: weight for text, weight in law.items() if len(text) > 1 and text[0] == first}
    total = sum(longer.values())
    return [sum(w for text, w in longer.items() if text[1] == token) / total for token in range(3)]


def test_what_a_block_emits_follows_the_target_exactly():
    """Enumerated: the first token has law p_1, and given that a second one was emitted it has law p_2."""
    law = block_law(P, Q, accept_sampled)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(first_token(law), P[0].numpy(), atol=1e-12)
    for first in range(3):
        np.testing.assert_allclose(second_token_after(law, first), P[1].numpy(), atol=1e-12)


def test_the_acceptance_rate_is_one_minus_the_total_variation():
    """1 - TV((.5,.2,.3), (.2,.7,.1)) = min-sum = .2 + .2 + .1 = .5."""
    law = block_law(P, Q, accept_sampled)
    assert sum(weight for text, weight in law.items() if len(text) > 1) == pytest.approx(0.5, abs=1e-12)


def _inverted_ratio(target, proposal, count, draws, requests):
    swapped = drafted(proposal.tokens, target[:, :-1])
    padded = torch.cat([proposal.probs, target[:, -1:]], 1)
    return accept_sampled(padded, swapped, count, draws, requests)


def _no_residual(target, proposal, count, draws, requests):
    ratio = target[:, :-1].gather(2, proposal.tokens[..., None]) / proposal.probs.gather(2, proposal.tokens[..., None])
    accepted = draws.accept(ratio.squeeze(2).clamp(max=1), count, requests)
    return accepted, draws.categorical(target[torch.arange(len(count)), torch.from_numpy(accepted)], requests)


def _not_the_drawn_distribution(target, proposal, count, draws, requests):
    return accept_sampled(target, drafted(proposal.tokens, proposal.probs.roll(1, 2)), count, draws, requests)


def _temperature_on_one_side(target, proposal, count, draws, requests):
    warmer = torch.softmax(proposal.probs.log() / 2, -1)
    return accept_sampled(target, drafted(proposal.tokens, warmer), count, draws, requests)


@pytest.mark.parametrize(
    "mutant", [_inverted_ratio, _no_residual, _not_the_drawn_distribution, _temperature_on_one_side]
)
def test_enumeration_catches_a_wrong_rule(mutant):
    law = block_law(P, Q, mutant)
    assert np.abs(np.array(first_token(law)) - P[0].numpy()).max() > 0.01


def test_only_the_tokens_under_verification_are_looked_at():
    """Rows of one batch verify 0, 1 and 2 tokens; certain acceptance then emits exactly these and a bonus from p."""
    target = torch.eye(3).expand(3, -1, -1)
    tokens = torch.tensor([[0, 1]] * 3)
    proposal = drafted(tokens, torch.full((3, 2, 3), 1 / 3))
    accepted, following = accept_sampled(target, proposal, lengths(0, 1, 2), EnumeratingDraws([()] * 3), np.arange(3))
    assert accepted.tolist() == [0, 1, 2]
    assert following.tolist() == [0, 1, 2]


def test_columns_of_a_reduced_vocabulary_stand_for_their_tokens():
    """q on tokens (2, 0) draws column 0, token 2, which p gives .3 against q's .6: accepted half of the time."""
    target = torch.tensor([[[0.5, 0.2, 0.3], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[0.6, 0.4]]])
    proposal = drafted(torch.tensor([[2]]), q, indices=torch.tensor([[0]]), token_ids=torch.tensor([2, 0]))
    reject = EnumeratingDraws([(0,)])
    accepted, following = accept_sampled(target, proposal, lengths(1), reject, np.arange(1))
    # max(p - q, 0) = (.1, .2, 0): the first possible outcome is token 0, with a third of the mass.
    assert (accepted.tolist(), following.tolist()) == ([0], [0])
    assert reject.weights[0] == pytest.approx(0.5 / 3)


def test_nothing_drafted_is_plain_sampling():
    draws = EnumeratingDraws([()])
    accepted, following = accept_sampled(torch.tensor([[[0.0, 1.0]]]), None, lengths(0), draws, np.arange(1))
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_drafts_without_their_distributions_are_refused_above_temperature_zero():
    greedy = Proposal(torch.tensor([[1]]), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="without its distributions"):
        accept_sampled(torch.full((1, 2, 3), 1 / 3), greedy, lengths(1), EnumeratingDraws([()]), np.arange(1))
