"""The reduced draft vocabulary: the tokens that the target actually answers with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dspark.errors import SettingsError
from dspark.training.sequences import TrainingSequence


def select_draft_tokens(
    sequences: Sequence[TrainingSequence],
    size: int,
    vocab_size: int,
    *,
    always: Iterable[int],
    never: Iterable[int],
    known: Tensor | None = None,
) -> Tensor:
    """The most frequent response tokens of the train split.

    Ties, and places left when the responses hold fewer different tokens, go first to tokens that are known, then to
    lower ids, which byte-pair tokenizers give to more frequent tokens. So a vocabulary that training starts with is
    kept, but for tokens that these responses hold less often than new ones.

    Args:
        size: Vd < vocab_size.
        vocab_size: V.
        always: ids that are in whatever their count: the end-of-sequence tokens.
        never: ids that are out: the mask token, which never occurs in text.
        known: ids of the weights that training starts from, int64; None: it starts from nothing.
    Returns:
        target ids, ascending, int64 [Vd].
    Raises:
        SettingsError: if `size` tokens cannot be chosen.
    """
    forced, excluded = sorted(set(always)), sorted(set(never))
    if not len(forced) <= size <= vocab_size - len(excluded) or set(forced) & set(excluded):
        raise SettingsError(
            f"drafter.draft_vocab_size: cannot choose {size} of {vocab_size} tokens, "
            f"{len(forced)} of them always and {len(excluded)} never"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(sequence.token_ids[sequence.prompt_length :], minlength=vocab_size)
    if known is not None:
        counts *= 2
        counts[known] += 1
    counts[forced] = torch.iinfo(torch.int64).max
    counts[excluded] = -1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def draft_columns(draft_token_ids: Tensor, vocab_size: int) -> Tensor:
    """Column of the draft logits of every target id, int64 [V]; -1 outside the draft vocabulary."""
    columns = torch.full((vocab_size,), -1, dtype=torch.int64)
    columns[draft_token_ids] = torch.arange(len(draft_token_ids))
    return columns


def coverage(sequences: Sequence[TrainingSequence], columns: Tensor | None) -> float:
    """Share of response tokens that are in the draft vocabulary."""
    if columns is None:
        return 1.0
    tokens = torch.cat([row.token_ids[row.prompt_length :] for row in sequences])
    return float((columns[tokens] >= 0).double().mean())
