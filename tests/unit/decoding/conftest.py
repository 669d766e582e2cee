from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.decoding.drafting import Proposal
from dspark.evaluation.tiny import tiny_target
from dspark.targets.loading import Target


class ScriptedProposer:
    """Drafts what it is told: for each request the tokens that follow its prompt, position by position.

    It counts positions by itself, so a loop that loses or repeats one gets drafts that don't fit.
    """

    def __init__(self, gamma: int, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> None:
        self.gamma = gamma
        self.full = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        self.confidence = 2.0
        self.began: list[tuple[int, int]] = []

    def begin(self, batch: int, max_length: int) -> None:
        self.began.append((batch, max_length))
        self.lengths = np.zeros(batch, np.int64)

    def extend(self, features: Tensor, counts: np.ndarray, token_ids: Tensor) -> None:
        assert features.shape[0] == len(counts) == len(self.lengths)
        assert (counts <= features.shape[1]).all()
        assert token_ids.shape == features.shape[:2]
        self.lengths = self.lengths + counts

    def keep(self, rows: Sequence[int]) -> None:
        self.lengths = self.lengths[list(rows)]

    def join(self, features: Tensor, counts: np.ndarray, token_ids: Tensor) -> None:
        assert features.shape[:2] == token_ids.shape and features.shape[0] == len(counts)
        assert len(self.lengths) + len(counts) <= self.began[-1][0]
        self.lengths = np.concatenate([self.lengths, counts])

    def propose(self, anchors: Tensor, temperature: float, draws: object, requests: np.ndarray) -> Proposal:
        rows = []
        for request, length, anchor in zip(requests, self.lengths, anchors.tolist(), strict=True):
            text = self.full[request]
            assert text[length] == anchor, "the anchor stands right after the context"
            block = text[length + 1 : length + 1 + self.gamma]
            rows.append(block + [0] * (self.gamma - len(block)))
        logits = torch.full((len(rows), self.gamma), self.confidence)
        return Proposal(torch.tensor(rows), logits)


@pytest.fixture
def scripted() -> type[ScriptedProposer]:
    return ScriptedProposer


@pytest.fixture(scope="session")
def llama() -> Target:
    return tiny_target(40, spread=0.5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
