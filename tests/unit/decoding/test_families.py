"""The loop on every family: a drafter fits it, and drafts change nothing that is said."""

from __future__ import annotations

import torch

from dspark.decoding.drafting import TorchProposer
from dspark.decoding.loop import decode
from dspark.evaluation.tiny import tiny_drafter
from dspark.targets.loading import Target

PROMPTS = [[3, 4, 5], [7] * 9, [2, 9, 30, 4, 5]]


def test_drafts_change_nothing_that_is_said_greedily(family_target: Target):
    proposer = TorchProposer(tiny_drafter(family_target, 3))
    done = decode(family_target, proposer, PROMPTS, max_new_tokens=12)
    for prompt, one in zip(PROMPTS, done, strict=True):
        text = list(prompt)
        while len(text) < len(prompt) + len(one.token_ids):
            text.append(int(family_target.model(torch.tensor([text])).logits[0, -1].argmax()))
        assert one.token_ids == text[len(prompt) :]
