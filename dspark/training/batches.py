"""Batches of blocks: what one step computes, and the stateless order in which sequences come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.drafters.attention import Packing
from dspark.training.anchors import Positions, response_mask, supervised_slots
from dspark.training.losses import SlotTargets
from dspark.training.sequences import TrainingSequence

# Batches are cut from so many batches' worth of shuffled sequences sorted by length, so that the parts of a step which
# processes or accumulation compute apart are of similar size.
SORTED_BATCHES = 8


@dataclass(frozen=True)
class Batch:
    """The blocks of some sequences, packed without padding: N blocks, T context positions, M supervised slots.

    A sequence that has no anchor is left out, and a sequence's context ends before its last anchor.

    Attributes:
        features: taps of the contexts, one sequence after the other, [T, m*d].
        positions: of these in their sequences, int64 [T].
        anchor_ids, anchors: anchor tokens and their positions in their sequences, int64 [N].
        packing: which blocks and which context belong together, and what a block sees.
        slot_rows: supervised slots as indices into [N * K], int64 [M].
        previous_ids: teacher-forced token before the label, int64 [M].
        targets: labels and target distributions of the supervised slots.
    """

    features: Tensor
    positions: Tensor
    anchor_ids: Tensor
    anchors: Tensor
    packing: Packing
    slot_rows: Tensor
    previous_ids: Tensor
    targets: SlotTargets

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        moved: dict[str, Any] = {field.name: getattr(self, field.name).to(device) for field in fields(self)}
        return type(self)(**moved)

    @property
    def nbytes(self) -> int:
        """What its features take in memory; a few numbers stand beside each position and slot."""
        return self.features.nbytes + self.targets.target_hidden.nbytes


def make_batch(
    sequences: Sequence[TrainingSequence],
    anchors: Sequence[Positions],
    gamma: int,
    columns: Tensor | None,
    max_length: int | None = None,
) -> Batch:
    """The batch of given anchors in given sequences.

    Slot j of the block at anchor p: context 0 .. p-1, label x[p+1+j], previous token x[p+j], target distribution at
    position p+j, the one that predicts the label.

    Args:
        anchors: positions per sequence, ascending; at least one in all.
        gamma: K.
        columns: column of the draft logits of every target id, int64 [V], -1 outside the draft vocabulary; None: the
            whole vocabulary.
        max_length: tokens of a sequence; the rest is cut.
    """
    used = [(sequence, chosen) for sequence, chosen in zip(sequences, anchors, strict=True) if len(chosen)]
    lengths = [int(chosen[-1]) for _, chosen in used]  # of the contexts
    slot_rows, slots, previous, labels, hidden, normalisers, anchor_ids = [], [], [], [], [], [], []
    blocks = 0
    for sequence, chosen in used:
        tokens = sequence.token_ids if max_length is None else sequence.token_ids[:max_length]
        supervised = supervised_slots(response_mask(len(tokens), sequence.prompt_length), chosen, gamma)
        block, slot = np.nonzero(supervised)
        before = torch.from_numpy(chosen[block] + slot)  # p + j
        slot_rows.append((blocks + block) * gamma + slot)
        slots.append(slot)
        previous.append(tokens[before])
        labels.append(tokens[before + 1])
        hidden.append(sequence.last_hidden[before])
        normalisers.append(sequence.logsumexp[before])
        anchor_ids.append(tokens[torch.from_numpy(chosen)])
        blocks += len(chosen)
    label_ids = torch.cat(labels)
    places = torch.from_numpy(np.concatenate([chosen for _, chosen in used]))
    return Batch(
        features=torch.cat([sequence.taps[:length] for (sequence, _), length in zip(used, lengths, strict=True)]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        anchor_ids=torch.cat(anchor_ids),
        anchors=places,
        packing=Packing(tuple(len(chosen) for _, chosen in used), tuple(lengths), places),
        slot_rows=torch.from_numpy(np.concatenate(slot_rows)),
        previous_ids=torch.cat(previous),
        targets=SlotTargets(
            labels=label_ids if columns is None else columns[label_ids],
            target_hidden=torch.cat(hidden),
            logsumexp=torch.cat(normalisers).float(),
            slots=torch.from_numpy(np.concatenate(slots)),
        ),
    )


def epoch_order(lengths: NDArray[np.int64], batch: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Batches of one epoch: every sequence at most once, those of a batch of similar length, the tail dropped.

    Args:
        lengths: tokens per sequence, [n]; n >= batch.
        batch: sequences per batch.
    Returns:
        indices [batch] per batch; a function of the arguments only.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
    order = generator.permutation(len(lengths))
    whole = order[: len(order) - len(order) % batch]
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(whole), batch * SORTED_BATCHES):
        group = whole[start : start + batch * SORTED_BATCHES]
        group = group[np.argsort(lengths[group], kind="stable")]
        batches.extend(np.split(group, len(group) // batch))
    return [batches[index] for index in generator.permutation(len(batches))]
