"""The sequences that training reads, and what is known of them as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from dspark.errors import DataError
from dspark.training.anchors import anchor_candidates, response_mask


class TrainingSequence(Protocol):
    """One prompt with its response and the target's features; `FeatureSequence` of the feature store is one."""

    @property
    def domain(self) -> str:
        """That the prompt belongs to."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [S]."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the response."""

    @property
    def taps(self) -> Tensor:
        """Outputs of the tapped layers, [S, m*d]."""

    @property
    def last_hidden(self) -> Tensor:
        """The target's final-normed hidden states, [S, d]."""

    @property
    def logsumexp(self) -> Tensor:
        """Over the whole vocabulary of the target's logits, float32 [S]."""


def usable_sequences(sequences: Sequence[TrainingSequence], max_length: int, split: str) -> list[TrainingSequence]:
    """Sequences with at least one anchor."""
    usable = [
        row
        for row in sequences
        if len(anchor_candidates(response_mask(min(len(row.token_ids), max_length), row.prompt_length)))
    ]
    if not sequences:
        raise DataError(f"the {split} split has no sequences at all", "add prompts to the domains of the build")
    if not usable:
        raise DataError(
            f"the {split} split has no response of two tokens or more among {len(sequences)} sequences",
            f"add prompts, or raise training.max_length ({max_length}): prompts take up to "
            f"{max(row.prompt_length for row in sequences)} tokens of it",
        )
    return usable


def token_digest(sequences: Sequence[TrainingSequence]) -> str:
    """sha256 of the sequences' tokens and prompt lengths."""
    digest = hashlib.sha256()
    for row in sequences:
        digest.update(np.array([len(row.token_ids), row.prompt_length]).tobytes())
        digest.update(row.token_ids.numpy().tobytes())
    return digest.hexdigest()
