"""EAGLE-3 under the loop that DSpark runs under: right tokens, right distributions, the target's law."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.config.models import DrafterSettings, MarkovSettings
from dspark.decoding.draws import CounterDraws
from dspark.decoding.loop import decode
from dspark.decoding.policies import Fixed
from dspark.decoding.proposers import torch_proposer
from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.kinds import build_drafter
from dspark.evaluation.enumeration import EnumeratingDraws, enumerate_law, largest_difference, target_law
from dspark.evaluation.tiny import tiny_target
from dspark.targets.loading import Target

PROMPTS = [[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5], [5, 6], [11, 12, 13, 14, 15, 16], [8, 2]]


def eagle3(target: Target, gamma: int) -> Drafter:
    settings = DrafterSettings(
        kind="eagle3", gamma=gamma, layers=1, markov=MarkovSettings(type="none"), confidence=False
    )
    drafter = build_drafter(DrafterConfig.of(target.record, settings), target.embedding, target.head, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # proposals that vary from token to token
    return drafter.to(target.dtype)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_drafts_change_nothing_that_is_said_greedily(llama: Target, batch_size: int):
    plain = decode(llama, None, PROMPTS, max_new_tokens=16)
    done = decode(llama, torch_proposer(eagle3(llama, 3)), PROMPTS, max_new_tokens=16, batch_size=batch_size)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.cycles.accepted.sum() for one in done) > 0


def test_what_is_drafted_in_the_loop_is_what_a_chain_over_the_whole_text_drafts(llama: Target):
    """Every cycle's drafts, redone from the text's features with the one-shot form and no cache."""
    drafter = eagle3(llama, 3)
    for one, prompt in zip(
        decode(llama, torch_proposer(drafter), PROMPTS, max_new_tokens=12, batch_size=6), PROMPTS, strict=True
    ):
        text, position = torch.tensor([[*prompt, *one.token_ids]]), len(prompt)
        features = llama.hidden(text).taps
        for drafted, committed in zip(one.cycles.drafted.tolist(), one.cycles.committed.tolist(), strict=True):
            assert redone(drafter, features[:, :position], text[:, : position + 1]) == drafted
            position += committed


@torch.no_grad()
def redone(drafter: Drafter, features: Tensor, ids: Tensor) -> list[int]:
    projected = drafter.project(features)
    anchor = torch.tensor([[ids.shape[1] - 1]])
    chains = drafter.chains(drafter.pairs(projected, ids[:, 1:]), projected[:, -1:], anchor)
    tokens, previous = [], ids[:, -1:]
    for _ in range(drafter.config.gamma):
        previous = drafter.base_logits(drafter.step(chains, previous)).argmax(-1)
        tokens.append(int(previous))
    return tokens


def test_the_law_of_the_first_tokens_is_the_targets():
    """Every path of draws on three tokens, summed exactly; four tokens show what follows a block accepted whole."""
    target = tiny_target(3, eos_token_ids=(1,), dtype=torch.float64)
    proposer = torch_proposer(eagle3(target, 2), torch.float64)
    drafts = 0

    def run(draws: EnumeratingDraws, requests: int) -> list[list[int]]:
        nonlocal drafts
        done = decode(
            target,
            proposer,
            [[2, 0]] * requests,
            max_new_tokens=4,
            policy=Fixed(),
            temperature=1.0,
            draws=draws,
            precision=torch.float64,
            batch_size=requests,
        )
        drafts += sum(int(one.cycles.verified.sum()) for one in done)
        return [one.token_ids for one in done]

    law, paths = enumerate_law(run)
    assert largest_difference(law, target_law(target, [2, 0], 4, 1.0)) < 1e-12
    assert paths > 100 and drafts


@torch.no_grad()
def test_sampled_tokens_come_from_the_distribution_that_is_handed_on(llama: Target):
    """q of each slot is the softmax of that step given the tokens drawn before it, in float32, at the temperature."""
    drafter = eagle3(llama, 3)
    proposer = torch_proposer(drafter)
    ids, lengths = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), np.array([4, 2])
    features = llama.hidden(ids).taps
    proposer.begin(2, 16)
    proposer.extend(features, lengths, ids)
    anchors = torch.tensor([20, 21])
    proposal = proposer.propose(anchors, 0.7, CounterDraws([1, 2]), np.arange(2))
    assert proposal.probs is not None and proposal.indices is not None and proposal.confidence_logits is None
    assert torch.equal(proposal.tokens, proposal.indices)
    for row, length in enumerate(lengths.tolist()):
        text = torch.cat([ids[row, :length], anchors[row : row + 1]])[None]
        projected = drafter.project(features[row : row + 1, :length])
        chains = drafter.chains(drafter.pairs(projected, text[:, 1:]), projected[:, -1:], torch.tensor([[length]]))
        previous = text[:, -1:]
        for slot in range(3):
            logits = drafter.base_logits(drafter.step(chains, previous))[0, 0]
            expected = torch.softmax(logits / 0.7, -1)
            torch.testing.assert_close(proposal.probs[row, slot], expected, atol=1e-5, rtol=1e-4)
            previous = proposal.tokens[row, slot].view(1, 1)
