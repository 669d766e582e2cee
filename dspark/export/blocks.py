"""Blocks to compare dialects on, and what a drafter drafts for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.drafters.kinds import require_dspark, require_eagle3
from dspark.errors import DataError

if TYPE_CHECKING:
    from dspark.features.shards import FeatureSequence
    from dspark.features.sources import FeatureRow

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class ProbeBlocks:
    """Real contexts and anchors.

    Attributes:
        features: the target's concatenated taps before each anchor, one float32 array [S_i, m*d] per block, S_i >= 1.
        anchors: the token at position S_i, int64 [blocks].
        tokens: those of the context, int64 [S_i] per block, for drafters that read them; (): not known.
    """

    features: tuple[Floats, ...]
    anchors: Integers
    tokens: tuple[Integers, ...] = ()

    def __post_init__(self) -> None:
        if not self.features or len(self.features) != len(self.anchors):
            raise DataError(f"{len(self.features)} contexts and {len(self.anchors)} anchors make no blocks")
        if any(len(context) == 0 for context in self.features):
            raise DataError("a block without context cannot be compared: the target has always seen a token before")
        if self.tokens and [len(row) for row in self.tokens] != [len(row) for row in self.features]:
            raise DataError("the tokens of the contexts are not as many as their positions")

    @classmethod
    def of_arrays(cls, features: Floats, lengths: Integers, anchors: Integers) -> ProbeBlocks:
        """Blocks from padded features [blocks, S, m*d], their lengths [blocks] and anchors [blocks]."""
        rows = tuple(row[:length] for row, length in zip(features, lengths, strict=True))
        return cls(rows, np.asarray(anchors, np.int64))

    @classmethod
    def of_sequences(
        cls, sequences: Sequence[FeatureSequence | FeatureRow], *, count: int = 64, longest: int = 512, seed: int = 0
    ) -> ProbeBlocks:
        """Blocks at random anchors of responses, the sequences taken in turn.

        Args:
            sequences: for example the dev split.
            count: how many blocks.
            longest: anchors stand at most so far into their sequence.
            seed: of the choice of anchors.
        Raises:
            DataError: no sequence has a response token with a token before it.
        """
        usable = [row for row in sequences if max(row.prompt_length, 1) < min(len(row.token_ids), longest + 1)]
        if not usable:
            raise DataError("no sequence is long enough to take blocks from")
        generator = np.random.default_rng(seed)
        features, anchors, tokens = [], [], []
        for index in range(count):
            row = usable[index % len(usable)]
            position = int(generator.integers(max(row.prompt_length, 1), min(len(row.token_ids), longest + 1)))
            features.append(row.taps[:position].float().numpy())
            anchors.append(int(row.token_ids[position]))
            tokens.append(row.token_ids[:position].numpy())
        return cls(tuple(features), np.array(anchors, np.int64), tuple(tokens))

    def __len__(self) -> int:
        return len(self.features)

    @property
    def lengths(self) -> Integers:
        """Context positions of each block, [blocks]; also the position of its anchor."""
        return np.array([len(context) for context in self.features], np.int64)

    def padded(self, rows: slice, filler: float) -> tuple[Floats, Integers, Integers]:
        """Some blocks as one batch: features [B, S, m*d] padded with `filler`, lengths [B], anchors [B]."""
        lengths = self.lengths[rows]
        batch = np.full((len(lengths), int(lengths.max()), self.features[0].shape[1]), filler, np.float32)
        for row, context in enumerate(self.features[rows]):
            batch[row, : len(context)] = context
        return batch, lengths, self.anchors[rows]


@dataclass(frozen=True)
class Drafts:
    """What was drafted for the blocks.

    Attributes:
        tokens: target token ids, int64 [blocks, gamma].
        confidence: confidence logits, float32 [blocks, gamma]; None: the drafter has no such head.
        logits: draft logits, one array [gamma, columns] per block, if the dialect shows them.
        token_ids: target token id of each of their columns; None: column = id.
    """

    tokens: Integers
    confidence: Floats | None
    logits: tuple[Floats, ...] = ()
    token_ids: Integers | None = None

    def lead(self, block: int, slot: int, token: int) -> float:
        """By how much the drafted token's logit leads that of another token; infinite if that one has no column."""
        columns = np.array([token]) if self.token_ids is None else np.flatnonzero(self.token_ids == token)
        logits = self.logits[block][slot]
        return float(logits.max() - logits[columns].max(initial=-np.inf))


@torch.no_grad()
def draft(
    drafter: Drafter,
    blocks: ProbeBlocks,
    distort: Callable[[Tensor], Tensor] | None = None,
) -> Drafts:
    """Draft greedily with a torch drafter, block by block, each alone, from its whole context at once.

    Args:
        drafter: in float32.
        distort: applied to the features [1, S, m*d] first (negative controls).
    Raises:
        DataError: the drafter reads the tokens of the contexts, and they are not known.
    """
    tokens, confidences, logits = [], [], []
    for number, (context, anchor) in enumerate(zip(blocks.features, blocks.anchors, strict=True)):
        features = torch.from_numpy(context).unsqueeze(0)
        if distort is not None:
            features = distort(features)
        start = torch.tensor(int(anchor))
        if drafter.config.kind == "eagle3":
            if not blocks.tokens:
                raise DataError("drafters of kind eagle3 read the tokens of their context, which these blocks lack")
            ids = torch.from_numpy(blocks.tokens[number]).unsqueeze(0)
            drafted, rows, confidence = _chain(require_eagle3(drafter, "this comparison"), features, ids, start)
        else:
            drafted, rows, confidence = _block(require_dspark(drafter, "this comparison"), features, start)
        tokens.append(drafted.numpy())
        logits.append(rows.numpy())
        if confidence is not None:
            confidences.append(confidence.numpy())
    columns = None if drafter.config.draft_vocab_size is None else drafter.draft_token_ids.numpy()
    return Drafts(np.stack(tokens), np.stack(confidences) if confidences else None, tuple(logits), columns)


def _block(drafter: DSparkDrafter, features: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens [gamma], logits [gamma, Vd] and confidence logits [gamma] of a block that is drafted in one pass."""
    gamma, length = drafter.config.gamma, features.shape[1]
    positions = torch.arange(length).unsqueeze(0)
    slots = length + torch.arange(gamma).view(1, 1, gamma)
    ids = drafter.block_inputs(anchor.view(1, 1))
    visible = torch.ones(1, 1, length, dtype=torch.bool)
    hidden = drafter.block_hidden(ids, drafter.project(features), positions, slots, visible)[0, 0]
    base = drafter.base_logits(hidden)
    chain, previous, rows, drafted, before = drafter.chain(), anchor, [], [], []
    for slot in range(gamma):
        before.append(previous)
        rows.append(base[slot] + chain.bias(previous, hidden[slot]))
        previous = drafter.to_target_ids(rows[-1].argmax())
        drafted.append(previous)
    return torch.stack(drafted), torch.stack(rows), drafter.confidence_logits(hidden, torch.stack(before))


def _chain(drafter: Eagle3Drafter, features: Tensor, ids: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor, None]:
    """Tokens [gamma] and logits [gamma, Vd] of a block that is drafted token by token; it has no confidences."""
    projected = drafter.project(features)
    following = torch.cat([ids[:, 1:], anchor.view(1, 1)], 1)
    start = torch.tensor([[features.shape[1]]])
    chains = drafter.chains(drafter.pairs(projected, following), projected[:, -1:], start)
    previous, rows, drafted = anchor.view(1, 1), [], []
    for _ in range(drafter.config.gamma):
        rows.append(drafter.base_logits(drafter.step(chains, previous))[0, 0])
        drafted.append(drafter.to_target_ids(rows[-1].argmax()))
        previous = drafted[-1].view(1, 1)
    return torch.stack(drafted), torch.stack(rows), None
